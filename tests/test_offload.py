"""What a rank keeps may be in files: the bits are the same, and a part of it is resident."""

import copy
import errno
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import offloaded
from fully import BUDGET, Tower, adamw, assert_alike, assert_equal, batch, fully, state_of, train
from pool import on_ranks
from zero_optim import RankMismatchError, RemoteRankError, ZeroRedundancyOptimizer, checkpoint
from zero_optim.ddp import FullyShardedDataParallel, Offload
from zero_optim.shard import mapped
from zero_optim.shard.mapped import PAGE, MappedMemory


def made(model: nn.Module, folder: Path | None, name: Any = "AdamW", **options: Any) -> Any:
    """Wrap a copy of a model, kept in files of a folder or in memory; gives wrapper and optimizer."""
    own = copy.deepcopy(model)
    optimizer_class = getattr(torch.optim, name) if isinstance(name, str) else name
    optimizer = ZeroRedundancyOptimizer(own.parameters(), optimizer_class, lr=1e-2, **options)
    return fully(own, optimizer, offload=None if folder is None else Offload(folder, BUDGET))


def assert_same_state(one: ZeroRedundancyOptimizer, other: ZeroRedundancyOptimizer) -> None:
    for param, twin in zip(one.param_groups[0]["params"], other.param_groups[0]["params"], strict=True):
        assert_equal(one.state.get(param, {}), other.state.get(twin, {}))


def assert_kept(optimizer: ZeroRedundancyOptimizer) -> None:
    """What is larger than a page is in files; if it is as much as with AdamW, it takes several portions."""
    keeping, state = optimizer.core.inputs.store.files, optimizer.core.owned._kept
    assert keeping is not None
    assert state is not None
    rows = [bucket.row for bucket in optimizer.core.sharding.row_buckets]
    beside = [value for entries in optimizer.state.values() for value in entries.values()]
    grads = [getattr(p.grad, "piece", p.grad) for p in optimizer.owned_parameters()]
    found = [tensor for tensor in (*rows, *beside, *grads) if tensor is not None and tensor.nbytes >= PAGE]
    assert len(found) > 3
    assert all(keeping._memory.holds(tensor) for tensor in found)
    if any("exp_avg" in entries for entries in optimizer.state.values()):
        assert len(list(state.portions())) > 1


@on_ranks(2)
@pytest.mark.parametrize(
    ("name", "dtype", "options"),
    [
        ("AdamW", torch.float32, {"fused": True, "ema_decay": 0.9}),
        ("SGD", torch.float32, {"momentum": 0.9}),
        ("Adafactor", torch.float32, {}),
        ("AdamW", torch.bfloat16, {"master_dtype": torch.float32, "ema_decay": 0.9}),
    ],
)
def test_what_is_kept_in_files_trains_to_the_same_bits(
    tmp_path: Path, name: str, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    model = Tower(width=48).to(dtype)
    (plain, one), (kept, other) = made(model, None, name, **options), made(model, tmp_path, name, **options)
    assert train(kept, other, most=0.5) == train(plain, one, most=0.5)
    assert_alike(plain, kept)
    assert_same_state(one, other)
    assert_kept(other)
    assert not [*tmp_path.iterdir()]


class Replacing(torch.optim.Optimizer):
    """Keeps more than a parameter's shape, nested, and makes it anew in each step."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    before = state.get("nested", ({"sums": [torch.zeros_like(param)] * 2},))[0]["sums"][1]
                    sums = before * 0.9 + param.grad
                    state["nested"] = ({"sums": [sums.repeat(2, *[1] * (sums.dim() - 1)), sums]},)
                    param.sub_(sums, alpha=group["lr"])


@on_ranks(2)
def test_state_that_is_nested_and_made_anew_moves_to_the_files(tmp_path: Path) -> None:
    model = Tower(width=48)
    (plain, one), (kept, other) = (
        made(model, own, Replacing, assume_separable=True) for own in (None, tmp_path)
    )
    assert train(kept, other) == train(plain, one)
    assert_alike(plain, kept)
    nested = [entries["nested"][0]["sums"] for entries in other.state.values()]
    large = [tensor for tensors in nested for tensor in tensors if tensor.nbytes >= PAGE]
    assert large
    assert all(other.core.inputs.store.files._memory.holds(tensor) for tensor in large)


@on_ranks(2)
def test_gradients_of_several_passes_add_up_in_files(tmp_path: Path) -> None:
    model = Tower(width=48)
    (plain, one), (kept, other) = made(model, None), made(model, tmp_path)
    held: list[tuple[Tensor, Tensor]] = []
    for step in range(2):
        for wrapped, optimizer in ((plain, one), (kept, other)):
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            for part in range(2):
                scaler.scale(wrapped(batch(2 * step + part)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        for param in other.owned_parameters():
            grad = getattr(param.grad, "piece", param.grad)
            assert isinstance(grad, Tensor)
            held.append((grad, grad.clone()))
        one.zero_grad()
        other.zero_grad()
    assert_alike(plain, kept)
    for grad, values in held:  # a user may hold a gradient, whose memory is not used again then
        assert torch.equal(grad, values)


@on_ranks(2)
def test_checkpoints_are_those_of_memory(tmp_path: Path) -> None:
    model, saved = Tower(width=48), tmp_path / "saved"
    (plain, one), (kept, other) = made(model, None), made(model, tmp_path)
    train(kept, other, 2)
    train(plain, one, 2)
    checkpoint.save(saved, model=kept, optimizer=other)
    train(kept, other, 2)
    checkpoint.load(saved, model=kept, optimizer=other)
    assert_alike(plain, kept)
    assert_same_state(one, other)
    other.zero_grad()
    assert_kept(other)
    assert train(kept, other, 2) == train(plain, one, 2)
    whole, third = made(model, None)
    checkpoint.load(saved, model=whole, optimizer=third)
    train(whole, third, 2)
    assert_alike(whole, kept)
    extra = nn.Parameter(torch.ones(64, 64))
    other.add_param_group({"params": [extra]})
    extra.grad = torch.ones(64, 64)
    other.step()
    assert (extra != 1).all()


class Counting(torch.optim.SGD):
    """Counts its steps in its groups, so that a step in portions would count more."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            group["lr"] = 0.1 / group["steps"]
        return super().step(closure)


@on_ranks(2)
def test_what_does_not_fit_is_refused_on_every_rank_before_anything_changes(tmp_path: Path) -> None:
    model = Tower(width=48)
    before, optimizer = state_of(model), adamw(model)

    def wrap(offload: Any, using: ZeroRedundancyOptimizer = optimizer) -> FullyShardedDataParallel:
        return FullyShardedDataParallel(model, using, units=[*model.blocks], offload=offload)

    is_first = dist.get_rank() == 0
    with pytest.raises(ValueError, match=r"budget of at least [0-9]+ bytes"):
        wrap(Offload(tmp_path, 1000))
    with pytest.raises(RankMismatchError, match="arguments of FullyShardedDataParallel"):
        wrap(Offload(tmp_path, BUDGET) if is_first else None)
    with pytest.raises(ValueError, match="is for a model on an accelerator"):
        wrap("cpu")
    with pytest.raises(TypeError, match="expected offload to be an Offload"):
        wrap("disk")
    counting = ZeroRedundancyOptimizer(model.parameters(), Counting, lr=0.1)
    with pytest.raises(ValueError, match="some parameters at a time"):
        wrap(Offload(tmp_path, BUDGET), counting)
    with pytest.MonkeyPatch.context() as patch:  # where the disk is full on one rank
        usage = mapped.shutil.disk_usage(tmp_path)._replace(free=4096 if is_first else 2**40)
        patch.setattr(mapped.shutil, "disk_usage", lambda _: usage)
        with pytest.raises((OSError, RemoteRankError), match="4096 bytes are free") as told:
            wrap(Offload(tmp_path, BUDGET))
        assert not is_first or getattr(told.value, "errno", None) == errno.ENOSPC
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "platform", "darwin")
        with pytest.raises(ValueError, match="on Linux only"):
            wrap(Offload(tmp_path, BUDGET))
    assert_equal(state_of(model), before)
    train(wrap(Offload(tmp_path, BUDGET)), optimizer, 1)


def test_an_offload_names_a_folder_and_bytes(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="existing folder"):
        Offload(tmp_path / "none", 1000)
    with pytest.raises(ValueError, match="above 0"):
        Offload(tmp_path, 0)
    with pytest.raises(TypeError, match="number of bytes"):
        Offload(tmp_path, 1.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a path"):
        Offload(3, 1000)  # type: ignore[arg-type]


def test_a_tensor_in_a_file_keeps_its_values_and_its_form(tmp_path: Path) -> None:
    memory = MappedMemory(tmp_path)
    values = torch.randn(300, 50).t()
    tensor = memory.empty_like(values).copy_(values)
    assert tensor.stride() == values.stride()
    part = tensor[3]
    memory.write_out([tensor, torch.ones(3)])
    assert torch.equal(tensor, values)
    memory.drop([part])
    assert torch.equal(part, values[3])
    with pytest.raises(OSError, match=r"expected to reserve [0-9]+ bytes in"):
        memory.reserve(2**60)
    assert len(_files_without_names()) == 1
    assert not [*tmp_path.iterdir()]


def _files_without_names() -> list[Path]:
    """List the files of mapped memory that this process has open."""
    found = []
    for path in Path("/proc/self/fd").iterdir():
        try:
            status = path.stat()
        except FileNotFoundError:  # that of the listing itself
            continue
        if status.st_nlink == 0 and status.st_size == mapped._LEAST_FILE_NBYTES:
            assert status.st_mode & 0o777 == 0o600
            found.append(path)
    return found


def test_memory_in_files_comes_back_when_nobody_holds_it(tmp_path: Path) -> None:
    memory = MappedMemory(tmp_path)
    tensor = memory.empty_like(torch.empty(2 * PAGE))
    address, view = tensor.data_ptr(), tensor[PAGE:]
    del tensor
    assert memory.empty_like(torch.empty(2 * PAGE)).data_ptr() != address
    del view
    taken = [memory.empty_like(torch.empty(2 * PAGE)) for _ in range(2)]
    assert address in [tensor.data_ptr() for tensor in taken]


@pytest.mark.slow
def test_no_more_is_resident_than_the_budget_allows(tmp_path: Path) -> None:
    budget = 6 * offloaded.LAYER_NBYTES
    command = [sys.executable, offloaded.__file__, str(tmp_path), str(budget)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    # Beside the budget two units are whole, two buckets of gradients and a gradient are under way, and the
    # class has temporary values of one parameter.
    beside = 6 * offloaded.LAYER_NBYTES
    slack = 12 * offloaded.LAYER_NBYTES  # what is imported by the way
    assert budget + beside + slack <= offloaded.KEPT_NBYTES // 2
    assert int(ran.stdout) < budget + beside + slack
