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
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from ddp_pairs import SMALL_MB, Pair, assert_same, mlp, mlp_loss
from pool import on_ranks
from process_memory import anonymous_nbytes
from zero_optim.ddp import DistributedDataParallel

VIEW = {"gradient_as_bucket_view": True}


def num_hooks(net: nn.Module) -> int:
    return sum(len(param._post_accumulate_grad_hooks or ()) for param in net.parameters())  # type: ignore[attr-defined]


@on_ranks(2)
def test_hooks_go_with_the_wrapper() -> None:
    for options in (VIEW, {"static_graph": True}):
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


M_MMAP_THRESHOLD = -3  # malloc.h


def build_and_drop(net: nn.Module, **options: Any) -> list[weakref.ref[Any]]:
    model = DistributedDataParallel(net, **options)
    for _ in range(2):
        model(torch.ones(1, 512)).sum().backward()
    net.zero_grad()
    own = model.reducer.own
    bucket = own.assignment.buckets[0]
    return [weakref.ref(thing) for thing in (model, own, bucket, bucket.storage.flat)]


@on_ranks(1)
def test_twenty_wrappers_leave_nothing_behind() -> None:
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**16)
    net = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))  # 4 MiB
    references = build_and_drop(net, **VIEW)
    gc.collect()
    before = anonymous_nbytes()
    for _ in range(20):
        references += build_and_drop(net, **VIEW)
    gc.collect()
    assert not any(reference() is not None for reference in references)
    assert anonymous_nbytes() - before < 4 * 2**20  # one model; 20 times as much if buckets stayed


@on_ranks(2)
def test_copies_and_pickles_train_on_as_the_original_does() -> None:
    for options in (VIEW, {"static_graph": True}):
        for passes in (0, 2):
            model = DistributedDataParallel(mlp(), bucket_cap_mb=SMALL_MB, **options)
            for number in range(passes):
                mlp_loss(model, number).backward()
            torch.save(model, file := io.BytesIO())
            file.seek(0)
            loaded = torch.load(file, weights_only=False)
            for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded):
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


# ---------------------- what is told about a wrapper


@on_ranks(2)
def test_logging_data_has_pytorchs_names_and_values() -> None:
    for options in ({"bucket_cap_mb": SMALL_MB}, {"static_graph": True}):
        pair = Pair.of(mlp(), **options)
        for model in pair:
            mlp_loss(model, 0).backward()
        ours, theirs = (model._get_ddp_logging_data() for model in pair)  # type: ignore[operator]
        assert ours == pair.ours.get_ddp_logging_data()
        for key in set(ours) & set(theirs):
            assert type(ours[key]) is type(theirs[key]), key
        for key in ("bucket_cap_bytes", "world_size", "static_graph"):
            assert ours.get(key) == theirs.get(key), key
        sizes = [int(size) for size in ours["bucket_sizes"].split(", ")]
        assert sum(sizes) == 4 * sum(p.numel() for p in pair.ours.parameters())
