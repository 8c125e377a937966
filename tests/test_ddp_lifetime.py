"""What stays of a wrapper when it goes (nothing), and what a copy or pickle of it does (the same)."""

import copy
import ctypes
import gc
import inspect
import io
import pickle
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from ddp_pairs import SMALL_MB, Pair, assert_averaged, assert_same, mlp, mlp_loss
from pool import on_ranks
from process_memory import anonymous_nbytes
from zero_optim.ddp import DistributedDataParallel, Reducer

VIEW = {"gradient_as_bucket_view": True}


def num_hooks(net: nn.Module) -> int:
    return sum(len(param._post_accumulate_grad_hooks or ()) for param in net.parameters())  # type: ignore[attr-defined]


@on_ranks(2)
def test_hooks_go_with_the_wrapper() -> None:
    for options in ({}, VIEW, {"find_unused_parameters": True}, {"static_graph": True}):
        net = mlp()
        assert num_hooks(net) == 0
        model = DistributedDataParallel(net, **options)
        assert num_hooks(net) == len(list(net.parameters()))
        for number in range(2):
            mlp_loss(model, number).backward()
        loss = mlp_loss(model, 2)
        reducer = weakref.ref(model.reducer.own)
        del model
        assert reducer() is None  # at once, without the garbage collector
        assert num_hooks(net) == 0
        net.zero_grad()
        loss.backward()  # a graph that outlives its wrapper gives this rank's gradients
        alone = copy.deepcopy(net)
        alone.zero_grad()
        mlp_loss(alone, 2).backward()
        for param, other in zip(net.parameters(), alone.parameters(), strict=True):
            assert_same(param.grad, other.grad, options)
        other_model = DistributedDataParallel(net, **options)
        other_model._remove_autograd_hooks()  # type: ignore[no-untyped-call]
        assert num_hooks(net) == 0


@on_ranks(1)
def test_hooks_go_after_a_pass_that_broke_off() -> None:
    """A pass that broke off does not keep anything alive either."""

    def interrupt(_: Tensor) -> None:
        raise KeyError

    net = mlp()
    model = DistributedDataParallel(net)
    handle = net[0].weight.register_hook(interrupt)
    with pytest.raises(KeyError):
        mlp_loss(model, 0).backward()
    handle.remove()
    reducer = weakref.ref(model.reducer.own)
    del model
    gc.collect()
    assert reducer() is None
    assert num_hooks(net) == 0


M_MMAP_THRESHOLD = -3  # malloc.h


def build_and_drop(net: nn.Module, **options: Any) -> list[weakref.ref[Any]]:
    model = DistributedDataParallel(net, **options)
    for _ in range(2):
        model(torch.ones(1, 512)).sum().backward()
    net.zero_grad()
    own = model.reducer.own
    bucket = own.assignment.buckets[0]
    return [weakref.ref(thing) for thing in (model, own, bucket, bucket.flat)]


@on_ranks(1)
def test_twenty_wrappers_leave_nothing_behind() -> None:
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**16)
    net = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))  # 4 MiB
    for options in ({}, VIEW):
        references = build_and_drop(net, **options)
        gc.collect()
        before = anonymous_nbytes()
        for _ in range(20):
            references += build_and_drop(net, **options)
        gc.collect()
        assert not any(reference() is not None for reference in references)
        assert anonymous_nbytes() - before < 4 * 2**20  # one model; 20 times as much if buckets stayed


def copies_of(model: DistributedDataParallel) -> list[DistributedDataParallel]:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    return [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded]


# Static graphs with find_unused_parameters make PyTorch's constructor warn.
@on_ranks(2)
def test_copies_and_pickles_train_on_as_the_original_does() -> None:
    for options in ({}, VIEW, {"static_graph": True}, {"find_unused_parameters": True}):
        for passes in (0, 2) if options in ({}, {"static_graph": True}) else (2,):
            model = DistributedDataParallel(mlp(), bucket_cap_mb=SMALL_MB, **options)
            for number in range(passes):
                mlp_loss(model, number).backward()
            for twin in copies_of(model):
                assert type(twin) is DistributedDataParallel
                assert twin.reducer.own is not model.reducer.own
                assert twin.reducer.own.options == model.reducer.own.options
                for number in range(10, 12):
                    for net in (model, twin):
                        net.zero_grad()
                        mlp_loss(net, number).backward()
                    for param, other in zip(model.parameters(), twin.parameters(), strict=True):
                        assert param.grad is not other.grad
                        assert_same(other.grad, param.grad, (options, passes, number))
    part = DistributedDataParallel(mlp(), process_group=dist.new_group([0, 1]))
    with pytest.raises(RuntimeError, match="only supported when using DDP with the default process group"):
        copy.deepcopy(part)


# torch.distributed.checkpoint imports what PyTorch deprecates.
@on_ranks(1)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_names_are_those_of_pytorchs_wrapper() -> None:
    net = mlp()
    model = DistributedDataParallel(net)
    assert isinstance(model, TorchDistributedDataParallel)
    assert model.module is net
    assert list(model.state_dict()) == [f"module.{name}" for name in net.state_dict()]
    plain = get_model_state_dict(model)
    assert list(plain) == list(net.state_dict())
    changed = {name: value + 1 for name, value in plain.items()}
    set_model_state_dict(model, dict(changed))
    for name, value in net.state_dict().items():
        assert torch.equal(value, changed[name])
    model.load_state_dict(model.state_dict())
    ours, theirs = (
        inspect.signature(kind) for kind in (DistributedDataParallel, TorchDistributedDataParallel)
    )
    assert ours == theirs


@on_ranks(4)
def test_the_process_group_may_be_changed() -> None:
    """Ranks leave and come back, as where machines fail."""
    rank = dist.get_rank()
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model, clean = DistributedDataParallel(mlp(), bucket_cap_mb=SMALL_MB), mlp()
    for number in range(2):
        mlp_loss(model, number).backward()
    assert model.get_ddp_logging_data()["world_size"] == 4
    for group, members in (
        (halves[rank // 2], [rank // 2 * 2, rank // 2 * 2 + 1]),
        (dist.group.WORLD, range(4)),
    ):
        model._update_process_group(group)  # type: ignore[no-untyped-call]
        data = model.get_ddp_logging_data()
        assert (data["world_size"], data["has_rebuilt_buckets"]) == (len(members), 0)
        for number in range(3):
            model.zero_grad()
            mlp_loss(model, number).backward()
            loss = lambda net, index, n=number, who=members: mlp_loss(net, n, who[index])  # noqa: E731
            where, size = (members, number), len(members)
            assert_averaged(model.module, clean, loss, where, size=size, tolerance=1e-6)  # type: ignore[arg-type]
        assert model.get_ddp_logging_data()["has_rebuilt_buckets"] == 1


@on_ranks(2)
def test_several_reducers_work_in_one_backward_pass() -> None:
    """A wrapper does not mind a reducer of one's own over other parameters of the same model."""
    net = nn.ModuleDict({"ours": mlp(), "other": mlp()})
    model = DistributedDataParallel(net["ours"])
    reducer = Reducer(net["other"].named_parameters())
    (mlp_loss(model, 0) + mlp_loss(net["other"], 0)).backward()
    for one, two in zip(net["ours"].parameters(), net["other"].parameters(), strict=True):
        assert_same(one.grad, two.grad, "both")
    reducer.close()


# ---------------------- what is told about a wrapper


@on_ranks(2)
def test_names_and_values_are_those_of_pytorch() -> None:
    each: tuple[dict[str, Any], ...] = (
        {},
        {"bucket_cap_mb": SMALL_MB, "gradient_as_bucket_view": True},
        {"static_graph": True},
        {"find_unused_parameters": True},
    )
    for options in each:
        pair = Pair.of(mlp(), **options)
        built = pair.ours.get_ddp_logging_data()
        assert built["has_rebuilt_buckets"] == built["num_buckets_reduced"] == 0
        assert "rebuilt_bucket_sizes" not in built
        for number in range(3):
            for model in pair:
                mlp_loss(model, number).backward()
        theirs = pair.theirs._get_ddp_logging_data()  # type: ignore[no-untyped-call]
        ours = pair.ours._get_ddp_logging_data()  # type: ignore[no-untyped-call]
        assert ours == pair.ours.get_ddp_logging_data()
        for key in set(ours) & set(theirs):
            assert type(ours[key]) is type(theirs[key]), key
        for key in ("bucket_cap_bytes", "has_rebuilt_buckets", "world_size"):
            if key in theirs and not (key == "has_rebuilt_buckets" and options.get("static_graph")):
                assert ours[key] == theirs[key], (key, ours[key], theirs[key])
        assert ours.get("static_graph") == theirs.get("static_graph")
        assert ours["can_set_static_graph"] == 1
        sizes = [int(size) for size in ours["bucket_sizes"].split(", ")]
        assert sum(sizes) == 4 * sum(p.numel() for p in pair.ours.parameters())
        assert len(sizes) == ours["num_buckets_reduced"]
        if ours["has_rebuilt_buckets"]:
            assert ours["rebuilt_bucket_sizes"] == ours["bucket_sizes"]


@on_ranks(1)
def test_a_graph_with_the_same_unused_parameters_is_told_to_be_static() -> None:
    net = mlp()
    net.spare = torch.nn.Linear(8, 8)
    net.forward = lambda x: torch.nn.Sequential.forward(net[:-1], x)  # type: ignore[method-assign]
    model = DistributedDataParallel(net, find_unused_parameters=True)
    mlp_loss(model, 0).backward()
    assert model.get_ddp_logging_data()["can_set_static_graph"] == 1


@on_ranks(1)
def test_a_built_in_hook_has_the_name_that_pytorch_gives_it() -> None:
    pair = Pair.of(mlp())
    for model in pair:
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)  # type: ignore[attr-defined,operator]
    ours, theirs = (model._get_ddp_logging_data() for model in pair)  # type: ignore[operator]
    assert ours["comm_hook"] == theirs["comm_hook"] == "BuiltinCommHookType.FP16_COMPRESS"
