"""What an error says: what was expected, what came, and the line to write; at most 12 lines."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pool import on_ranks
from zero_optim import ReductionError, ZeroRedundancyOptimizer, checkpoint
from zero_optim.ddp import DistributedDataParallel, FullyShardedDataParallel, ShardedDataParallel

AdamW = torch.optim.AdamW
Make = Callable[..., object]


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


def averaging(given: Any, **options: Any) -> nn.Module:
    return DistributedDataParallel(given.model, **options)


def sharding(given: Any, **options: Any) -> nn.Module:
    return ShardedDataParallel(given.model, given.optimizer, **options)


def fully(given: Any, **options: Any) -> nn.Module:
    return FullyShardedDataParallel(given.model, given.optimizer, **options)


def torchs(model: nn.Module) -> object:
    from torch.distributed.optim import ZeroRedundancyOptimizer as Torchs

    return Torchs(model.parameters(), AdamW)


def replacing(wrap: Make, ranks: tuple[int, ...] = (0, 1), **options: bool) -> None:
    model = layers()
    wrapped: Any = wrap(SimpleNamespace(model=model, optimizer=sharded(model)), **options)
    if dist.get_rank() in ranks:
        model[1] = nn.Linear(8, 8)
    wrapped(torch.ones(1, 8)).sum().backward()


def to_meta(wrap: Make, *, wraps_first: bool = True) -> None:
    model = layers()
    given = SimpleNamespace(model=model, optimizer=sharded(model))
    if not wraps_first:
        model.to("meta")
    wrapped: Any = wrap(given)
    wrapped.to("meta")(torch.ones(1, 8, device="meta")).sum().backward()


def converting(wrap: Make) -> None:
    given = trained(wrap)
    given.wrapped.half()
    given.optimizer.step()


def reading(_: Path) -> None:
    for param in trained(sharding).model.parameters():
        param.grad.norm()


def reading_state(_: Path) -> None:
    given = trained(averaging)
    given.optimizer.step()
    own = given.optimizer.owned_state()
    for param in given.model.parameters():
        entries = given.optimizer.state[param]
        assert len(entries) == (3 if param in own else 0), entries
        entries["exp_avg"]


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
REPLACED = "every rank: replaced after wrapping, as by an assignment or "
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
    "a mistyped option of ours in DDP": (
        lambda _: DistributedDataParallel(layers(), time_out=1.0),
        ("DistributedDataParallel takes no time_out: did you mean timeout?",),
    ),
    "state of another rank": (
        reading_state,
        (
            "no 'exp_avg' on this rank: the parameter of shape (8, 8) is owned by rank 0. Read it there",
            "or by consolidate_state_dict() on all ranks",
        ),
    ),
    "to() at stage 1": (lambda _: converting(averaging), (CONVERT,)),
    "to() at stage 2": (lambda _: converting(sharding), (CONVERT,)),
    "to(meta) at stage 1": (lambda _: to_meta(averaging), (REPLACED, "by .to('meta'): 0.weight, 0.bias")),
    "to(meta) at stage 2": (lambda _: to_meta(sharding), (REPLACED,)),
    "to(meta) before stage 1": (
        lambda _: to_meta(averaging, wraps_first=False),
        ("a part of the model is on the meta device, which has no values: move it by to_empty()",),
    ),
    "a module replaced at stage 3": (lambda _: replacing(fully), ("Do that before the model is wrapped",)),
    "a module replaced at stage 3, find_unused_parameters": (
        lambda _: replacing(fully, find_unused_parameters=True),
        ("Do that before the model is wrapped",),
    ),
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


@on_ranks(2)
@pytest.mark.parametrize("wrap", [averaging, sharding])
@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph", None])
@pytest.mark.parametrize("ranks", [(0, 1), (1,)])
def test_a_module_that_was_replaced_after_wrapping_is_told_in_the_first_pass_on_every_rank(
    wrap: Make, option: str | None, ranks: tuple[int, ...]
) -> None:
    whose = "every rank" if len(ranks) > 1 else "rank 1"
    told = f"{whose}: replaced after wrapping, as by an assignment or by .to\\('meta'\\): 1.weight, 1.bias. "
    with pytest.raises(ReductionError, match=told) as error:
        replacing(wrap, ranks, **({} if option is None else {option: True}))
    assert "find_unused_parameters" not in str(error.value)


@on_ranks(2)
@pytest.mark.parametrize("wrap", [averaging, sharding])
def test_a_module_that_went_with_nothing_in_its_place_is_unused(wrap: Make) -> None:
    model = layers()
    optimizer = sharded(model)
    wrapped: Any = wrap(SimpleNamespace(model=model, optimizer=optimizer), find_unused_parameters=True)
    for _ in range(2):
        wrapped(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        model[1] = nn.Identity()


WRITE = """
import torch, torch.distributed as dist
from zero_optim.ddp import FullyShardedDataParallel
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = FullyShardedDataParallel(torch.nn.Linear(8, 8))
with torch.no_grad():
    model.module.weight.mul_(2)
"""


def test_an_uncaught_error_of_a_write_to_a_freed_weight_names_unsharded() -> None:
    ended = subprocess.run([sys.executable, "-c", WRITE], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    last = ended.stderr.strip().splitlines()[-1]
    assert "RuntimeError: unsupported operation: more than one element of the written-to tensor" in last
    assert last.endswith("Write to sharded weights inside zero_optim.ddp.unsharded(module)")


@on_ranks(1)
def test_one_rank_alone_has_the_whole_state_after_each_step() -> None:
    model = layers()
    optimizer = sharded(model)
    for step in (1.0, 2.0):
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        assert optimizer.state_dict()["state"][3]["step"] == step
