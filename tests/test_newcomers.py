"""What code written for PyTorch's class, or for a framework, finds here: names, types, messages."""

import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as TorchDdp
from torch.optim import Optimizer

import zero_optim
from pool import on_ranks
from training import (
    assert_same_bits,
    assert_same_state,
    make_params,
    pair_of,
    params_of,
    set_grads,
    train_both,
    twin,
)
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.ddp import DistributedDataParallel, FullyShardedDataParallel, ShardedDataParallel

AdamW, SGD = torch.optim.AdamW, torch.optim.SGD


def is_pytorchs(optimizer: object) -> bool:
    """Ask as public code does; importing PyTorch's class first, in the place of ours, would warn."""
    from torch.distributed.optim import ZeroRedundancyOptimizer as PyTorchs

    return isinstance(optimizer, PyTorchs)


# ---------------------------------------------------------------------- optim and isinstance


@on_ranks(2)
@pytest.mark.parametrize("case", ["cuts", "masters"])
def test_state_of_optim_is_found_by_the_parameters_of_the_model(case: str) -> None:
    dtype = torch.bfloat16 if case == "masters" else torch.float32
    options: dict[str, Any] = {"master_dtype": torch.float32} if case == "masters" else {}
    sharded = ZeroRedundancyOptimizer(make_params(((256, 300), (7,)), dtype), AdamW, lr=0.1, **options)
    assert any(len(pieces) > 1 for pieces in sharded.pieces().values()) or case == "masters"
    set_grads(params_of(sharded), 0)
    sharded.step()
    local: Any = sharded.optim
    assert isinstance(local, AdamW)
    assert local.defaults["lr"] == 0.1
    assert {param for param in params_of(sharded) if param in local.state} == set(sharded.owned_parameters())
    for param, leaf in zip(sharded.owned_parameters(), params_of(local), strict=True):
        assert leaf in local.state
        assert torch.equal(local.state[param]["exp_avg"], local.state[leaf]["exp_avg"])
    assert local.state_dict()["state"].keys() == set(range(len(sharded.owned_parameters())))
    local.mark = 3
    assert sharded.optim.mark == 3  # type: ignore[union-attr]


def own_part(optimizer: Any) -> dict[str, Any]:
    """The state that a rank owns, by index, as trainers find it with private names of PyTorch's class."""
    optimizer._check_overlap_initialized()
    optimizer._sync_param_groups(optimizer.param_groups, optimizer.optim.param_groups)
    local = optimizer.optim.state_dict()
    found = super(ZeroRedundancyOptimizer, optimizer).state_dict()
    members = optimizer._partition_parameters()[dist.get_rank()]
    for own, group in zip(local["param_groups"], members, strict=True):
        for index, param in zip(own["params"], group["params"], strict=True):
            found["state"][optimizer._param_to_index[param]] = local["state"][index]
    return found


@on_ranks(2)
def test_trainers_find_a_ranks_own_state_by_the_private_names_of_pytorchs_class() -> None:
    (plain, sharded), (_, other) = pair_of(AdamW, lr=0.1), pair_of(AdamW, lr=0.1)
    train_both(plain, sharded, 2)
    sharded.param_groups[0]["lr"] = plain.param_groups[0]["lr"] = 0.05
    part = own_part(sharded)
    assert part["param_groups"][0]["lr"] == sharded.optim.param_groups[0]["lr"] == 0.05
    every = sharded._all_params
    assert [every[index] for index in sorted(part["state"])] == sharded.owned_parameters()
    with torch.no_grad():
        for mine, value in zip(params_of(other), params_of(sharded), strict=True):
            mine.copy_(value)
    other.load_state_dict(part)
    train_both(plain, other, 2, first=2)


class Framework(ZeroRedundancyOptimizer):
    """As frameworks write it: positional arguments, a state dict that consolidates by itself."""

    def __init__(self, params: Any, cls: Any, group: Any = None, **defaults: Any) -> None:
        super().__init__(params, cls, group, False, False, **defaults)
        self.num_asked = 0

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        self.num_asked += 1
        self.consolidate_state_dict(to=None)
        return super().state_dict()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group({**param_group, "weight_decay": 0.5})


@on_ranks(2)
def test_a_framework_s_subclass_works() -> None:
    params = make_params()
    plain, sharded = AdamW(twin(params), lr=0.1), Framework(params, AdamW, lr=0.1)
    assert is_pytorchs(sharded)
    train_both(plain, sharded, 2)
    state = sharded.state_dict()
    assert_same_state(state, plain.state_dict())
    assert sharded.num_asked == 1
    again = Framework(twin(params), AdamW, lr=0.1)
    again.load_state_dict(state)
    for optimizer in (sharded, again):
        set_grads(params_of(optimizer), 9)
        optimizer.step()
    assert_same_bits(params_of(again), params_of(sharded))


@on_ranks(2)
def test_one_leaves_torchs_own_class_alone_and_unpickled_is_of_pytorchs_name_too() -> None:
    unhooked = Optimizer.step
    sharded = ZeroRedundancyOptimizer(make_params(), AdamW, lr=0.1)
    assert Optimizer.step is unhooked
    assert is_pytorchs(pickle.loads(pickle.dumps(sharded)))
    assert not is_pytorchs(AdamW(make_params()))


def test_imports_bring_nothing_of_pytorch_that_is_slow_to_import() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); import zero_optim, zero_optim.checkpoint.offline; "
        "import zero_optim.cli, zero_optim.ddp, zero_optim.hooks; "
        "slow = ('torch.distributed.optim', 'torch.distributed.checkpoint', 'torch._dynamo', 'sympy'); "
        "assert not [name for name in set(sys.modules) - before if name.startswith(slow)]; "
        "zero_optim.checkpoint.OptimizerState"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=600)


@on_ranks(2)
def test_repr_says_class_ranks_stage_what_is_owned_and_bytes() -> None:
    rank, adamw = dist.get_rank(), "AdamW, rank {} of 2, owns 1 of 2 parameters, {} bytes of state"

    def layer() -> nn.Linear:
        return nn.Linear(4, 1)

    model = layer()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW)
    before = adamw.format(rank, 0)
    assert repr(optimizer).startswith(f"ZeroRedundancyOptimizer({before}, ZeRO stage 1\nParameter Group 0\n")
    wrapped = ShardedDataParallel(model, optimizer)
    wrapped(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    after = adamw.format(rank, optimizer.state_nbytes())
    assert repr(wrapped).startswith(f"ShardedDataParallel(\n  {after}, ZeRO stage 2\n  (module): Linear(")
    wrapped.detach()
    optimizer.detach()
    assert after in repr(optimizer)
    whole = DistributedDataParallel(layer())
    assert repr(whole).startswith(f"DistributedDataParallel(\n  rank {rank} of 2, 20 bytes of gradients\n")
    whole.detach()
    assert "detached\n" in repr(whole)
    fully = FullyShardedDataParallel(layer())
    assert "  no optimizer yet, ZeRO stage 3\n" in repr(fully)
    optimizer = ZeroRedundancyOptimizer(fully.parameters(), AdamW)
    assert f"  {before}, ZeRO stage 3\n" in repr(fully)
    assert f"({before}, ZeRO stage 3\n" in repr(optimizer)


@on_ranks(1)
def test_completion_shows_what_a_user_may_call() -> None:
    assert set(dir(zero_optim)) == {
        *zero_optim.__all__,
        "checkpoint",
        "ddp",
        "hooks",
        "integrations",
        "__version__",
    }
    assert zero_optim.integrations is sys.modules["zero_optim.integrations"]
    for package in (zero_optim.checkpoint, zero_optim.ddp, zero_optim.hooks):
        assert dir(package) == sorted(package.__all__)
    model = nn.Linear(4, 4)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW)
    own = {name for name in {*dir(optimizer)} - {*dir(AdamW)} if not name.startswith("_")}
    assert own >= {"explain", "owners", "rebind", "state_nbytes"}
    assert not own & {"core", "iteration", "begin_overlapped_step"}
    of_whole, of_fully = (
        dir(DistributedDataParallel(nn.Linear(4, 4))),
        dir(FullyShardedDataParallel(model, optimizer)),
    )
    assert {"module", "no_sync", "metrics"} <= {*of_whole} & {*of_fully}
    assert not {"reducer", "logger", "bucket_bytes_cap", "units", "before_forward"} & {*of_whole, *of_fully}


# ---------------------------------------------------------------------- classes that step() asks something


class NeedsTemperature(SGD):
    def step(self, closure: Any = None, *, temperature: float) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data.add_(p.grad, alpha=-group["lr"] * temperature)


class NeedsLossBeforeClosure(SGD):
    def step(self, loss: float, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)


@on_ranks(2)
def test_a_class_whose_step_needs_a_keyword_is_told_the_option_first() -> None:
    missing = r"nothing was found against it: .*step\(\) missing 1 required"
    with pytest.raises(ValueError, match=f"{missing} positional argument: 'loss'"):
        ZeroRedundancyOptimizer(make_params(), NeedsLossBeforeClosure, lr=0.1)
    params = make_params()
    with pytest.raises(ValueError, match=f"{missing} keyword-only argument: 'temperature'") as told:
        ZeroRedundancyOptimizer(params, NeedsTemperature, lr=0.1)
    text = str(told.value)
    assert text.index("assume_separable=True") < text.index("without sharding")
    sharded = ZeroRedundancyOptimizer(params, NeedsTemperature, lr=0.1, assume_separable=True)
    plain = NeedsTemperature(twin(params), lr=0.1)
    for optimizer in (plain, sharded):
        set_grads(params_of(optimizer), 0)
        optimizer.step(temperature=0.5)  # type: ignore[call-arg]
    assert_same_bits(params_of(sharded), params_of(plain))


# ---------------------------------------------------------------------- scalers


class HandsItselfIn(torch.amp.GradScaler):
    """As FairScale's scaler does."""

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        return optimizer.step(*args, **kwargs, grad_scaler=self)  # type: ignore[call-arg]


@on_ranks(2)
def test_a_scaler_that_hands_itself_in_is_refused() -> None:
    sharded = ZeroRedundancyOptimizer(make_params(), AdamW, lr=0.1)
    set_grads(params_of(sharded), 0)
    with pytest.raises(TypeError, match=r"takes no grad_scaler: call torch.amp.GradScaler.step\(optimizer\)"):
        HandsItselfIn("cpu").step(sharded)


@on_ranks(2)
def test_an_infinity_that_a_scaler_cannot_be_told_of_raises_on_every_rank() -> None:
    params = make_params()
    sharded = ZeroRedundancyOptimizer(params, AdamW, lr=0.1)
    before = [p.detach().clone() for p in params]
    set_grads(params, 0)
    sharded.found_inf, sharded.grad_scale = torch.tensor(float(dist.get_rank())), None
    with pytest.raises(RuntimeError, match=r"scalers of ranks \[1\] found an infinite .* \[0\] did not"):
        sharded.step()
    assert_same_bits(params, before)


# ---------------------------------------------------------------------- messages


@on_ranks(2)
def test_pytorchs_own_hook_says_which_import_to_change() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import (
        hook_with_zero_step,
        hook_with_zero_step_interleaved,
    )

    ddp = TorchDdp(nn.Linear(3, 2))
    sharded = ZeroRedundancyOptimizer(ddp.parameters(), AdamW, overlap_with_ddp=True, lr=0.1)
    for make in (hook_with_zero_step, hook_with_zero_step_interleaved):
        with pytest.raises(AttributeError, match=r"import them from zero_optim\.hooks"):
            make(allreduce_hook, ddp, sharded)  # type: ignore[arg-type]
    assert not hasattr(sharded, "_overlap_with_ddp")
