"""The chains of calls in docs/design.md are those that an iteration makes."""

import re
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pool import on_ranks
from zero_optim import RemoteRankError, ZeroRedundancyOptimizer
from zero_optim.ddp import FullyShardedDataParallel, ShardedDataParallel

PAGE = (Path(__file__).parents[1] / "docs" / "design.md").read_text()
SECTION = PAGE.partition("## Who calls whom\n")[2].partition("\n## ")[0]
CELLS = [
    [cell.strip() for cell in line.strip("| ").split("|")] for line in SECTION.splitlines() if "→" in line
]
# By what runs them, each chain as names of functions.
CHAINS = {
    run: [re.findall(r"`([\w.]+)`", chain) for _, of, cell in CELLS if of == run for chain in cell.split(";")]
    for run in ("ZeRO-2", "ZeRO-3", "a rank raises")
}


class Recorded:
    """Finds the chains that were called: each function inside the call of the one before."""

    def __init__(self, chains: list[list[str]]) -> None:
        self.missing = list(chains)

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call" or "zero_optim" not in frame.f_code.co_filename:
            return
        ends = [chain for chain in self.missing if chain[-1] == frame.f_code.co_qualname]
        if not ends:
            return
        stack, caller = list[str](), frame.f_back
        while caller is not None:
            stack.append(caller.f_code.co_qualname)
            caller = caller.f_back
        for chain in ends:
            outer = iter(stack)
            if all(name in outer for name in reversed(chain[:-1])):
                self.missing.remove(chain)


class Raising(torch.optim.SGD):
    """Raises where a gradient is infinite."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            if any(param.grad is not None and param.grad.isinf().any() for param in group["params"]):
                raise ValueError("planted")
        return super().step(closure)


def test_the_page_has_chains_of_each_run() -> None:
    assert all(len(chains) > 1 for chains in CHAINS.values())


@pytest.mark.skipif(sys.version_info < (3, 11), reason="code knows no qualified name")
@on_ranks(2)
@pytest.mark.parametrize("run", CHAINS)
def test_an_iteration_makes_the_calls_of_the_page(run: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    kind = Raising if run == "a rank raises" else torch.optim.AdamW
    optimizer = ZeroRedundancyOptimizer(model.parameters(), kind, lr=0.1, bucket_cap_mb=0.0002)
    if run == "ZeRO-3":
        wrapped: nn.Module = FullyShardedDataParallel(model, optimizer, units=nn.Linear)
    else:
        wrapped = ShardedDataParallel(model, optimizer)
    recorded, has_raised = Recorded(CHAINS[run]), False
    for module in (threading, sys):
        module.setprofile(recorded)
    try:
        for _ in range(2):
            wrapped(torch.ones(2, 8)).square().mean().backward()
            if run == "a rank raises" and dist.get_rank() == 1:
                optimizer.owned_parameters()[0].grad.fill_(torch.inf)
            optimizer.step()
            optimizer.zero_grad()
    except (ValueError, RemoteRankError):
        has_raised = True
    finally:
        for module in (threading, sys):
            module.setprofile(None)
    assert not recorded.missing
    assert has_raised == (run == "a rank raises")
