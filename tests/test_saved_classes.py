"""What classes save in ways of their own goes through every save and resume, or the class is refused."""

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
from zero_optim.probe.subject import under_test

SAVED = (own.WarmsUp, own.Nests, own.KeepsObjects, own.WritesDown)
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
    for name, saved in (("two ranks", plain), ("moved", plain), ("its own", sharded)):
        runs[name] = ZeroRedundancyOptimizer(twin(params_of(plain)), kind)
        runs[name].load_state_dict(saved.state_dict())
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
def test_a_class_whose_state_would_be_lost_is_refused_unless_nobody_saves(
    kind: type[Optimizer], options: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    plain = kind(make_params(), **options)
    words = f"neither consolidated, saved nor loaded: .*{reason}.*allow_unsaved=True"
    with pytest.raises(TypeError, match=words):
        ZeroRedundancyOptimizer(make_params(), kind, **options)
    group = {"params": make_params(((3, 2),)), "optimizer_class": kind, **options}
    with pytest.raises(TypeError, match=words):
        ZeroRedundancyOptimizer(make_params(), torch.optim.SGD).add_param_group(group)
    sharded = ZeroRedundancyOptimizer(make_params(), kind, allow_unsaved=True, **options)
    step_all([plain, sharded], range(3))
    with pytest.raises(TypeError, match=reason):
        sharded.consolidate_state_dict()
    with pytest.raises(TypeError, match=reason):
        checkpoint.save(tmp_path / "saved", optimizer=sharded)


@on_ranks(2)
def test_a_class_of_its_own_saves_is_refused_beside_others() -> None:
    groups = [{"params": make_params(((3, 2),))}, {"params": make_params(), "optimizer_class": own.WarmsUp}]
    with pytest.raises(TypeError, match=r"with that of other classes.*allow_unsaved=True"):
        ZeroRedundancyOptimizer(groups, torch.optim.SGD)
    ZeroRedundancyOptimizer(groups, torch.optim.SGD, allow_unsaved=True)


@on_ranks(2)
def test_random_rounding_of_half_precision_refuses_nothing_but_half_precision() -> None:
    kind = own.RoundsStochastically
    half = [p.detach().bfloat16().requires_grad_() for p in make_params()]
    with pytest.raises(ValueError, match=r"draws random numbers.*master_dtype=torch\.float32"):
        ZeroRedundancyOptimizer(half, kind)
    ZeroRedundancyOptimizer(half, kind, master_dtype=torch.float32).step()
    sharded = ZeroRedundancyOptimizer(make_params(), kind)
    with pytest.raises(ValueError, match="draws random numbers"):
        sharded.add_param_group({"params": half})
    step_all([kind(make_params()), sharded], range(3))


def test_a_file_builds_no_object_of_another_class() -> None:
    name = ["list", [["plain", "subprocess"], ["plain", "Popen"]]]
    with pytest.raises(TypeError, match=r"needs the class subprocess\.Popen"):
        decode(["object", [name, ["dict", []]]], iter([]))


def test_what_trying_cannot_see_stands_in_the_table() -> None:
    """A coupling from step 50 on (65 by an entry), or above the largest size, passes; the page says so."""
    with warnings.catch_warnings():
        assert probe(under_test(own.CouplesLate, {})).separable
        assert probe(under_test(own.WritesDown, {"uses": "norm", "begin": 64})).separable
        assert probe(under_test(own.CouplesLarge, {"above": 10**6})).separable
    page = TABLE.read_text()
    assert "Trials take 9 steps (of an entry: 64)" in page
    assert "at most 8,192 elements (cuts: 45,056). They do not" in page
