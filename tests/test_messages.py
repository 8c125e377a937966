"""What an error says: what was expected, what came, and the line to write; at most 12 lines."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pool import on_ranks
from zero_optim import ZeroRedundancyOptimizer, checkpoint
from zero_optim.ddp import DistributedDataParallel, FullyShardedDataParallel, ShardedDataParallel

AdamW = torch.optim.AdamW
Make = Callable[[Any], object]


def layers(count: int = 2, width: int = 8) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))


def sharded(model: nn.Module, **options: Any) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(model.parameters(), AdamW, **options)


def trained(wrap: Make) -> Any:
    """A wrapped model and its optimizer, behind a backward pass."""
    model = layers()
    optimizer = sharded(model)
    wrapped: Any = wrap(SimpleNamespace(model=model, optimizer=optimizer))
    wrapped(torch.ones(1, 8)).sum().backward()
    return SimpleNamespace(wrapped=wrapped, optimizer=optimizer, model=model)


def sharding(given: Any) -> nn.Module:
    return ShardedDataParallel(given.model, given.optimizer)


def fully(given: Any) -> nn.Module:
    return FullyShardedDataParallel(given.model, given.optimizer)


def torchs(model: nn.Module) -> object:
    from torch.distributed.optim import ZeroRedundancyOptimizer as Torchs

    return Torchs(model.parameters(), AdamW)


def replacing(wrap: Make) -> None:
    model = layers()
    wrapped: Any = wrap(SimpleNamespace(model=model, optimizer=sharded(model)))
    model[1] = nn.Linear(8, 8)
    wrapped(torch.ones(1, 8)).sum().backward()


def converting(wrap: Make) -> None:
    given = trained(wrap)
    given.wrapped.half()
    given.optimizer.step()


def reading(_: Path) -> None:
    for param in trained(sharding).model.parameters():
        param.grad.norm()


def asking(_: Path) -> None:
    given = trained(sharding)
    given.optimizer.step()
    given.optimizer.state_dict()


def loading(path: Path, kind: str) -> None:
    checkpoint.save(path / "run" / "step-5", model=layers())
    if dist.get_rank() == 0:
        torch.save(layers().state_dict(), path / "plain.pt")
    dist.barrier()
    checkpoint.load(path / kind, model=layers())


def loading_other(path: Path) -> None:
    many, more = layers(30), layers(40, width=9)
    checkpoint.save(path / "many", model=many, optimizer=sharded(many))
    checkpoint.load(path / "many", model=more, optimizer=sharded(more))


OURS = "expected a zero_optim.ZeroRedundancyOptimizer, got "
CONVERT = "Convert or move the model first, then build the optimizer"
CALLS: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "stage 2 with ZeRO of PyTorch": (
        lambda _: ShardedDataParallel(model := layers(), torchs(model)),  # type: ignore[arg-type]
        (
            f"{OURS}ZeroRedundancyOptimizer of torch.distributed.optim",
            "from zero_optim import ZeroRedundancyOptimizer",
        ),
    ),
    "stage 3 with AdamW": (
        lambda _: FullyShardedDataParallel(model := layers(), AdamW(model.parameters())),  # type: ignore[arg-type]
        (f"{OURS}AdamW of torch.optim.adamw: build ZeroRedundancyOptimizer(module.parameters(), AdamW,",),
    ),
    "stage 2 with a list": (
        lambda _: ShardedDataParallel(model := layers(), [sharded(model)]),  # type: ignore[arg-type]
        (f"{OURS}list of builtins: give one optimizer, whose groups may have an optimizer_class",),
    ),
    "a mistyped option": (
        lambda _: sharded(layers(), bucket_cap=1),
        ("AdamW takes no argument 'bucket_cap': did you mean bucket_cap_mb?",),
    ),
    "a mistyped option of a wrapper": (
        lambda _: FullyShardedDataParallel(model := layers(), sharded(model), unit="auto"),
        ("got unit: did you mean units?",),
    ),
    "a module of Python for a class": (
        lambda _: ZeroRedundancyOptimizer(layers().parameters(), torch.optim),  # type: ignore[arg-type]
        ("expected optimizer_class to be a class such as torch.optim.AdamW", "got a module, torch.optim"),
    ),
    "a model for a class": (
        lambda _: ZeroRedundancyOptimizer(layers().parameters(), layers()),  # type: ignore[arg-type]
        ("expected optimizer_class to be a class such as torch.optim.AdamW", "got a module, Sequential"),
    ),
    "names of classes as units": (
        lambda _: FullyShardedDataParallel(model := layers(), sharded(model), units=["Linear"]),  # type: ignore[list-item]
        ("got str 'Linear': give modules of the model, or the class itself in the place of its name",),
    ),
    "two paths": (
        lambda path: checkpoint.save(path / str(dist.get_rank()), model=layers()),
        ("ranks disagree about what to save (all ranks give the same path and arguments): rank 0 has path=",),
    ),
    "a file of torch.save": (
        lambda path: loading(path, "plain.pt"),
        ("plain.pt: it is a file, for torch.load; zero-optim convert makes a checkpoint of it",),
    ),
    "the folder around checkpoints": (
        lambda path: loading(path, "run"),
        ('there are checkpoints in it: load checkpoint.latest("', "or one of them"),
    ),
    "a checkpoint of another model": (
        loading_other,
        (
            "model entries that the checkpoint lacks (20): 30.weight, 30.bias, 31.weight, 31.bias,",
            "shapes in the checkpoint and here (60): 0.weight (8, 8) and (9, 9), 0.bias (8,) and (9,),",
            "and 55 more",
            "parameters that the checkpoint lacks (20): ",
        ),
    ),
    "state_dict() on every rank": (asking, ("the state is on its owners, and rank", "on all ranks first")),
    "a partial gradient": (
        reading,
        ("optimizer.clip_grad_norm_()", "it returns the norm to log, and changes nothing"),
    ),
    "to() at stage 1": (lambda _: converting(lambda given: DistributedDataParallel(given.model)), (CONVERT,)),
    "to() at stage 2": (lambda _: converting(sharding), (CONVERT,)),
    "to() at stage 3": (
        lambda _: converting(fully),
        ("a fully sharded model cannot be converted or moved", "before it is wrapped, on all ranks"),
    ),
    "a module replaced under DDP": (
        lambda _: replacing(lambda given: DistributedDataParallel(given.model)),
        ("If they were replaced after wrapping, build the optimizer and the wrapper anew",),
    ),
    "a module replaced at stage 2": (
        lambda _: replacing(sharding),
        ("If they were replaced after wrapping, build the optimizer and the wrapper anew",),
    ),
    "a module replaced at stage 3": (lambda _: replacing(fully), ("Do that before the model is wrapped",)),
}


@on_ranks(2)
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.jit")  # PyTorch's own class scripts functions
@pytest.mark.parametrize("case", CALLS)
def test_an_error_says_what_came_and_what_to_write(case: str, tmp_path: Path) -> None:
    call, texts = CALLS[case]
    error: Exception | None = None
    try:
        call(tmp_path)
    except Exception as caught:  # noqa: BLE001 - its text counts
        error = caught
    told: list[str | None] = [None, None]
    dist.all_gather_object(told, None if error is None else str(error))
    said = " | ".join(text for text in told if text is not None)
    for text in texts:
        assert text in said, said
    assert max(text.count("\n") for text in told if text is not None) < 12


@on_ranks(1)
def test_one_rank_alone_has_the_whole_state_after_each_step() -> None:
    model = layers()
    optimizer = sharded(model)
    for step in (1.0, 2.0):
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        assert optimizer.state_dict()["state"][3]["step"] == step
