"""What a fully sharded model refuses, on every rank, and changes nothing by it."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join

from fully import NARROW, Tower, adamw, assert_equal, fully, loss_of, on_meta, state_of, train
from meshes import mesh_of
from pool import on_ranks
from stalling import TIMEOUT
from zero_optim import RankMismatchError, RemoteRankError, ZeroRedundancyOptimizer
from zero_optim.ddp import (
    DistributedDataParallel,
    FullyShardedDataParallel,
    PrecisionPolicy,
    ShardedDataParallel,
    full_state_dict,
    unsharded,
)

BF16, FP32 = torch.bfloat16, torch.float32


@on_ranks(2)
def test_wrong_arguments_change_nothing() -> None:
    model = Tower()
    optimizer = adamw(model)
    wrong: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (TypeError, "expected mixed_precision to be", {"mixed_precision": object()}),
        (TypeError, "takes no bucket_cap_mb", {"bucket_cap_mb": 1}),
        (TypeError, "expected units to be modules", {"units": ["blocks.0"]}),
        (ValueError, "no module of the model", {"units": [nn.Linear(2, 2)]}),
        (ValueError, "never called itself", {"units": [model.blocks]}),
        (Exception, "units", {"units": "auto" if dist.get_rank() else 3}),
    ]
    before = state_of(model)
    for kind, words, options in wrong:
        with pytest.raises(kind, match=words):
            FullyShardedDataParallel(model, **{"optimizer": optimizer, **options})
    assert_equal(state_of(model), before)
    with pytest.raises(ValueError, match="no parameter of this Tower is sharded"), unsharded(model):
        pass
    train(FullyShardedDataParallel(model, optimizer), optimizer)


@on_ranks(2)
def test_what_would_need_parameters_that_are_not_there_is_refused() -> None:
    model = Tower()
    wrapped, optimizer = fully(model)
    for build in (FullyShardedDataParallel, ShardedDataParallel):
        with pytest.raises((ValueError, RuntimeError), match="fully sharded"):
            build(model, optimizer)
    for module in (model, wrapped):
        with pytest.raises(ValueError, match="is fully sharded already"):
            DistributedDataParallel(module)
    other = nn.Linear(2, 2)
    optimizer.add_param_group({"params": [*other.parameters()]})
    with pytest.raises(RuntimeError, match="fully sharded model already"):
        FullyShardedDataParallel(other, optimizer)
    for call in (wrapped.detach, optimizer.detach):
        with pytest.raises(RuntimeError, match="cannot be detached"):
            call()
    with pytest.raises(RuntimeError, match="no part in Join"), Join([wrapped]):
        pass
    with pytest.raises(RuntimeError, match="no comm hook"):
        wrapped.register_comm_hook(None, lambda _, bucket: bucket)
    for thing in (wrapped, model, optimizer):
        with pytest.raises(RuntimeError, match="cannot be copied or pickled"):
            copy.deepcopy(thing)
    with pytest.raises(RuntimeError, match="create_graph=True is not possible"):
        torch.autograd.grad(loss_of(wrapped, 0), [model.first.weight], create_graph=True)
    part, message = model.blocks[0].up, "this Linear lies inside a unit of a fully sharded model"
    with pytest.raises(ValueError, match=message), unsharded(part):
        pass
    with pytest.raises(ValueError, match=message):
        full_state_dict(part)


WRONG: dict[str, Callable[[Any, bool], object]] = {
    "load_state_dict": lambda model, bad: model.load_state_dict(3 if bad else {}),
    "full_state_dict of another": lambda model, bad: full_state_dict(Tower() if bad else model),
    "load_local_state_dict": lambda model, bad: model.load_local_state_dict(
        3 if bad else model.local_state_dict()
    ),
}


@on_ranks(2)
def test_a_state_dict_that_one_rank_asks_for_wrongly_raises_on_all_and_changes_nothing() -> None:
    wrapped, _ = fully()
    loss_of(wrapped, 0).backward()  # before that, calls agree on conversions first
    before = full_state_dict(wrapped, ranks=(0, 1))
    for call in WRONG.values():
        with pytest.raises((TypeError, ValueError)) as caught:
            call(wrapped, dist.get_rank() == 1)
        assert dist.get_rank() or "rank 1: " in str(caught.value)
        after = full_state_dict(wrapped, ranks=(0, 1))
        assert_equal(after, before)
        loss_of(wrapped, 0).backward()


@on_ranks(2, forked=True)
def test_unsharded_of_no_model_on_one_rank_is_told_after_the_timeout() -> None:
    model = Tower()
    wrapped, _ = fully(model, adamw(model, timeout=TIMEOUT), timeout=TIMEOUT)
    loss_of(wrapped, 0).backward()
    if dist.get_rank():
        with pytest.raises(TypeError, match="expected a fully sharded model, or a module of one, got int"):
            unsharded(3).__enter__()  # type: ignore[arg-type]
    else:
        with pytest.raises(RemoteRankError, match="every rank waits, but not for the same; "):
            unsharded(wrapped).__enter__()


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.weight = nn.Parameter(torch.ones(2))


@on_ranks(2)
def test_a_model_from_the_meta_device_that_nobody_can_initialize_is_refused() -> None:
    with pytest.raises(ValueError, match="the outermost module, a Bare, is on the meta device and has no"):
        FullyShardedDataParallel(on_meta(Bare))
    with pytest.raises(ValueError, match="nothing in this one is"):
        FullyShardedDataParallel(Bare(), init=nn.Linear.reset_parameters)
    half = Bare()
    half.inner.to("meta")
    half.inner.requires_grad_(False)
    optimizer = ZeroRedundancyOptimizer([half.weight], torch.optim.AdamW)
    with pytest.raises(ValueError, match="wrap it without an optimizer, then build"):
        FullyShardedDataParallel(half, optimizer)


@on_ranks(2)
def test_a_later_optimizer_that_cannot_be_is_refused_and_changes_nothing() -> None:
    model = Tower()
    wrapped = FullyShardedDataParallel(model, units=[*model.blocks])
    with pytest.raises(ValueError, match="lacks 2 trainable parameters"):
        ZeroRedundancyOptimizer([*model.parameters()][2:], torch.optim.AdamW)
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("a fully sharded model takes none", {"overlap_with_ddp": True}),
        ("Invalid beta", {"betas": (2.0, 2.0)}),  # in the class itself, when rows were moved
        ("another process group", {"process_group": dist.new_group()}),
    ]
    for words, options in wrong:
        with pytest.raises(ValueError, match=words):
            adamw(wrapped, **options)
    with unsharded(model), pytest.raises(RuntimeError, match="inside unsharded"):
        adamw(wrapped)
    loss_of(wrapped, 0).backward()
    with pytest.raises(RuntimeError, match="before the first backward pass"):
        adamw(wrapped)
    wrapped.zero_grad()
    whole = DistributedDataParallel(Tower())
    whole.module.load_state_dict(model.state_dict())
    optimizer = adamw(wrapped)
    with pytest.raises(ValueError, match="has an optimizer already"):
        adamw(wrapped)
    assert train(wrapped, optimizer) == train(whole, adamw(whole))


PLAIN: list[tuple[Any, dict[str, Any]]] = [(torch.optim.AdamW, {}), (torch.optim.SGD, {"foreach": True})]


@on_ranks(1)
def test_an_optimizer_that_is_not_sharded_cannot_step_a_fully_sharded_model() -> None:
    model = Tower()
    wrapped = FullyShardedDataParallel(model, units=[*model.blocks])
    loss_of(wrapped, 0).backward()
    for kind, options in PLAIN:
        plain = kind(wrapped.parameters(), **options)
        with pytest.raises(RuntimeError, match=f"build ZeroRedundancyOptimizer.*{kind.__name__}"):
            plain.step()
    wrapped.zero_grad()
    train(wrapped, adamw(wrapped))
    whole = Tower()
    loss_of(whole, 0).backward()
    torch.optim.AdamW(whole.parameters()).step()  # others step as ever


class FailingOnTheLast(torch.optim.AdamW):
    """Cannot be built on the last rank."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, lr=lr)
        if dist.get_rank() == 3:
            raise ArithmeticError("on purpose")


@on_ranks(4)
def test_replicas_refuse_a_mesh_or_a_later_optimizer_together() -> None:
    model = Tower()
    some = [mesh_of(2), mesh_of(4)]
    with pytest.raises(RankMismatchError, match=r"rank 3 has mesh=None"):
        FullyShardedDataParallel(model, mesh=None if dist.get_rank() == 3 else some[0])
    with pytest.raises(RankMismatchError, match=r"has mesh=\[\[0\], \[1\]"):
        FullyShardedDataParallel(model, mesh=some[dist.get_rank() // 3])
    with pytest.raises(ValueError, match="expected an optimizer over one row of the mesh"):
        FullyShardedDataParallel(model, mesh=some[0], process_group=some[0].get_group(0))
    wrapped = FullyShardedDataParallel(model, mesh=some[0])
    with pytest.raises(RankMismatchError, match="optimizers of the replicas"):  # in one replica alike
        adamw(wrapped, lr=0.1 * (1 + dist.get_rank() // 2))
    with pytest.raises(Exception, match="on purpose"):
        ZeroRedundancyOptimizer(wrapped.parameters(), FailingOnTheLast, lr=1e-2)
    train(wrapped, adamw(wrapped))


@on_ranks(2)
def test_parameters_that_another_wrapper_has_taken_are_refused() -> None:
    half = on_meta(Tower)
    with pytest.raises(ValueError, match=r"last\.weight has no values after init"):
        FullyShardedDataParallel(
            half, init=lambda module: None if module is half.last else module.reset_parameters()
        )
    with pytest.raises(ValueError, match="whose wrapping broke off"):  # it would train NaN
        FullyShardedDataParallel(half)
    model = Tower()
    wrapped = FullyShardedDataParallel(model)
    other = nn.Sequential(nn.Linear(2, 2), nn.Linear(8, 48))
    other[1].weight = model.first.weight
    with pytest.raises(ValueError, match="some parameters are those of another fully sharded model"):
        FullyShardedDataParallel(other)
    train(wrapped, adamw(wrapped))


@on_ranks(2)
def test_a_wrapper_that_raises_leaves_the_model_as_it_was() -> None:
    model, want = Tower(), Tower()
    with pytest.raises(TypeError, match="expected options among"):
        FullyShardedDataParallel(model, bogus=1)
    whole, other = DistributedDataParallel(want), DistributedDataParallel(model)  # an ordinary one again
    assert train(other, adamw(other)) == train(whole, adamw(whole))
    from_meta = on_meta(Tower)
    with pytest.raises(TypeError, match="expected options among"):
        FullyShardedDataParallel(from_meta, bogus=1)
    assert all(param.is_meta for param in from_meta.parameters())
    torch.manual_seed(1)
    assert_equal(state_of(FullyShardedDataParallel(from_meta)), state_of(Tower()))


def halved() -> nn.Module:
    return Tower().to(torch.float16)


@on_ranks(2)
@pytest.mark.parametrize(
    ("policy", "error", "message", "how"),
    [
        ("bfloat16", TypeError, "to be a zero_optim.ddp.PrecisionPolicy or", {}),
        (NARROW, ValueError, "cannot hold what owners keep of first.weight", {"model": halved}),
        (
            NARROW,
            ValueError,
            "adds up the gradients of several passes in torch.bfloat16",
            {"accumulate": "local"},
        ),
        (
            NARROW,
            RankMismatchError,
            "the arguments of FullyShardedDataParallel: rank 0 has mixed_precision: ",
            {"on_one": True},
        ),
    ],
)
def test_what_makes_no_sense_is_refused_on_every_rank(
    policy: object, error: type[Exception], message: str, how: dict[str, Any]
) -> None:
    model = how.pop("model", Tower)()
    optimizer = adamw(model)
    if how.pop("on_one", False) and dist.get_rank() == 0:
        policy = None
    with pytest.raises(error, match=message):
        FullyShardedDataParallel(model, optimizer, mixed_precision=policy, **how)


def test_a_policy_checks_itself() -> None:
    with pytest.raises(ValueError, match="expected gradients to be None or one of"):
        PrecisionPolicy(gradients=torch.int32)


def test_fsdp2s_policy_is_read() -> None:
    from torch.distributed import fsdp  # nothing of ours imports it

    two = fsdp.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32, output_dtype=FP32)
    assert PrecisionPolicy.of(two) == PrecisionPolicy(BF16, FP32, outputs=FP32, casts_inputs="units")
    with pytest.raises(TypeError, match=r"fsdp\.MixedPrecisionPolicy, got MixedPrecision"):
        PrecisionPolicy.of(fsdp.MixedPrecision(param_dtype=BF16))  # type: ignore[no-untyped-call]
