"""What classes save in ways of their own goes through every save and resume, or the class is warned of."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim import Optimizer

import own_classes as own
from optimizer_cases import TABLE
from pool import on_ranks
from training import assert_same_bits, make_params, params_of, set_grads, twin
from zero_optim import ZeroRedundancyOptimizer, checkpoint
from zero_optim.checkpoint.offline import consolidate
from zero_optim.comm.encoding import decode
from zero_optim.probe.probe import probe

SAVED = (own.WarmsUp, own.Nests, own.KeepsObjects)
UNSAVED: tuple[tuple[type[Optimizer], dict[str, Any], str], ...] = (
    (own.Forgets, {}, "not all that it needs"),
    (own.CountsWhatItHas, {}, "depends on the parameters"),
    (own.KeepsLocks, {}, "holds a lock"),
    (own.StateByIndex, {"in_state": False}, "not all that it needs"),
)


def step_all(runs: list[Any], steps: range) -> None:
    for step in steps:
        for run in runs:
            set_grads(params_of(run), step)
            run.step()
        for number, run in enumerate(runs[1:]):
            assert_same_bits(params_of(run), params_of(runs[0]), f"of run {number} after step {step}")


@on_ranks(2)
@pytest.mark.parametrize("kind", SAVED, ids=lambda kind: kind.__name__)
def test_state_in_a_form_of_its_own_resumes_everywhere(kind: type[Optimizer], tmp_path: Path) -> None:
    plain = kind(make_params())
    sharded = ZeroRedundancyOptimizer(make_params(), kind)
    step_all([plain, sharded], range(3))
    sharded.consolidate_state_dict(to=None)
    checkpoint.save(tmp_path / "saved", optimizer=sharded)
    runs = {"plain": kind(twin(params_of(plain)))}
    runs["plain"].load_state_dict(sharded.state_dict())
    for name in ("two ranks", "moved"):
        runs[name] = ZeroRedundancyOptimizer(twin(params_of(plain)), kind)
        runs[name].load_state_dict(plain.state_dict())
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    runs["one rank"] = ZeroRedundancyOptimizer(twin(params_of(plain)), kind, process_group=alone)
    checkpoint.load(tmp_path / "saved", optimizer=runs["one rank"])
    runs["moved"].detach()
    runs["moved"].rebind(dist.new_group([0, 1]))
    if dist.get_rank() == 0:
        consolidate(tmp_path / "saved", tmp_path / "whole.pt")
        runs["offline"] = kind(twin(params_of(plain)))
        runs["offline"].load_state_dict(torch.load(tmp_path / "whole.pt", weights_only=False))
    step_all([plain, sharded, *runs.values()], range(3, 6))


@on_ranks(2)
@pytest.mark.parametrize(
    ("kind", "options", "reason"), UNSAVED, ids=lambda value: getattr(value, "__name__", "")
)
def test_state_that_would_be_lost_is_told_when_the_optimizer_is_built(
    kind: type[Optimizer], options: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    plain = kind(make_params(), **options)
    with pytest.warns(UserWarning, match=f"neither consolidated, saved nor loaded: .*{reason}"):
        sharded = ZeroRedundancyOptimizer(make_params(), kind, **options)
    step_all([plain, sharded], range(3))
    with pytest.raises(TypeError, match=reason):
        sharded.consolidate_state_dict()
    with pytest.raises(TypeError, match=reason):
        checkpoint.save(tmp_path / "saved", optimizer=sharded)


def test_a_file_builds_no_object_of_another_class() -> None:
    name = ["list", [["plain", "subprocess"], ["plain", "Popen"]]]
    with pytest.raises(TypeError, match=r"needs the class subprocess\.Popen"):
        decode(["object", [name, ["dict", []]]], iter([]))


def test_what_trying_cannot_see_stands_in_the_table() -> None:
    """A coupling from step 50 on, and above the largest size tried, pass; the page says so."""
    with warnings.catch_warnings():
        assert probe(own.CouplesLate, {}).separable
        assert probe(own.CouplesLarge, {"above": 10**6}).separable
    page = TABLE.read_text()
    assert "begins after 9 steps" in page
    assert "more than 45,056 elements" in page
