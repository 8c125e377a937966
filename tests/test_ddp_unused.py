"""Unused parameters and outputs, under every mode: right gradients on all ranks, or a clear error at once."""

import copy
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ddp_pairs import assert_same, averaged
from pool import on_ranks
from zero_optim.ddp import DistributedDataParallel
from zero_optim.errors import ReductionError

MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "find_unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
}
LACKS = ("nothing", "parameter", "output", "parameter on rank 1")
WAYS = ("plain", "no_sync", "no_sync around backward", "checkpoint", "reentrant checkpoint")
BUCKET_CAP_MB = 0.0005  # several buckets


@dataclass
class Output:
    main: Tensor
    others: dict[str, list[Tensor]]


class Net(nn.Module):
    """Two heads, one of them perhaps not asked for, and a layer that is perhaps not used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8))
        self.main, self.other, self.spare = nn.Linear(8, 3), nn.Linear(8, 2), nn.Linear(8, 8)

    def forward(self, x: Tensor, with_spare: bool, reentrant: bool | None) -> Output:
        hidden = self.trunk(x) if reentrant is None else checkpoint(self.trunk, x, use_reentrant=reentrant)
        if with_spare:
            hidden = hidden + self.spare(hidden)
        return Output(self.main(hidden), {"heads": [self.other(hidden)]})


@dataclass(frozen=True)
class Case:
    lacks: str
    way: str

    def loss(self, net: nn.Module, rank: int, number: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * number + rank)
        x = torch.randn(4, 6, generator=generator, requires_grad=True)
        spared = self.lacks == "parameter" or (self.lacks == "parameter on rank 1" and rank == 1)
        reentrant = {"checkpoint": False, "reentrant checkpoint": True}.get(self.way)
        out = net(x, not spared, reentrant)
        loss = out.main.square().mean()
        return loss if self.lacks == "output" else loss + out.others["heads"][0].sin().mean()


def train(case: Case, ddp: nn.Module, number: int) -> range:
    """Run one iteration, two passes where the first is not reduced; tells which batches were used."""
    rank = dist.get_rank()
    if case.way in ("no_sync", "no_sync around backward"):
        quiet: Any = ddp.no_sync
        with quiet() if case.way == "no_sync" else nullcontext():
            loss = case.loss(ddp, rank, 2 * number)
        with quiet():
            loss.backward()
        case.loss(ddp, rank, 2 * number + 1).backward()
        return range(2 * number, 2 * number + 2)
    case.loss(ddp, rank, number).backward()
    return range(number, number + 1)


def check(mode: str, as_view: bool) -> None:
    for lacks, way in product(LACKS, WAYS):
        case, net = Case(lacks, way), Net()
        ddp = DistributedDataParallel(
            copy.deepcopy(net), gradient_as_bucket_view=as_view, bucket_cap_mb=BUCKET_CAP_MB, **MODES[mode]
        )
        where = (mode, lacks, way, as_view)
        if mode == "plain" and lacks != "nothing":
            check_error(case, ddp, where)
            continue
        for number in range(4):
            ddp.zero_grad(set_to_none=number % 2 == 0)
            numbers = train(case, ddp, number)
            losses = lambda net, rank, n=numbers, case=case: sum(case.loss(net, rank, k) for k in n)  # noqa: E731
            expected = averaged(net, losses, dist.get_world_size())  # type: ignore[arg-type]
            for name, param in ddp.module.named_parameters():
                at, want = (*where, number, name), expected.get(name)
                if want is None:  # gradients of zeros stay where nobody used a parameter
                    assert param.grad is None or (number % 2 and not param.grad.any()), at
                else:
                    tolerance = 0.0 if dist.get_world_size() == 2 else 1e-6  # sums in another order
                    assert_same(param.grad, want, at, tolerance)


def check_error(case: Case, ddp: nn.Module, where: object) -> None:
    """The first pass raises, on every rank, with names; the reducer is whole after it."""
    name = "other.bias" if case.lacks == "output" else "spare.bias"
    for _ in range(2):
        ddp.zero_grad()
        with pytest.raises(ReductionError, match=f"no gradient for .*{name}") as caught:
            train(case, ddp, 0)
        alone = case.lacks == "parameter on rank 1"
        assert ("rank 1:" if alone else "every rank:") in str(caught.value), where
        assert "find_unused_parameters=True" in str(caught.value)


@on_ranks(2)
@pytest.mark.parametrize("as_view", [False, True], ids=["copy", "view"])
@pytest.mark.parametrize("mode", MODES)
def test_every_combination_is_right_or_refused(mode: str, as_view: bool) -> None:
    check(mode, as_view)
