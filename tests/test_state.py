"""Whole state dicts: snapshots, staleness, loading, and what does not fit."""

import copy
import io
import sys
import warnings
from collections import OrderedDict
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pool import Ranks
from process_memory import forget_peak, peak_nbytes, resident_nbytes
from training import (
    MIXED,
    adamw_pair,
    assert_same_bits,
    assert_same_state,
    make_params,
    set_grads,
    train_both,
    twin,
)
from zero_optim import (
    NotConsolidatedError,
    RankMismatchError,
    StateMismatchError,
    ZeroRedundancyOptimizer,
)
from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.copies import PIECE_NBYTES
from zero_optim.comm.encoding import decode, encode
from zero_optim.comm.wire import recv_value, send_value
from zero_optim.run import progress


def check_before_any_step() -> None:
    plain, sharded = adamw_pair()
    assert_same_state(sharded.state_dict(), plain.state_dict())
    sharded.add_param_group({"params": make_params(((2, 2),), seed=3)})
    assert len(sharded.state_dict()["param_groups"]) == 2
    params = make_params()
    adagrad = torch.optim.Adagrad(params, initial_accumulator_value=0.5)
    sharded = ZeroRedundancyOptimizer(twin(params), torch.optim.Adagrad, initial_accumulator_value=0.5)
    assert_same_state(sharded.state_dict(), adagrad.state_dict())


def test_before_any_step_every_rank_knows_the_whole_state(ranks: Ranks) -> None:
    ranks.run(check_before_any_step)


def check_staleness() -> None:
    plain, sharded = adamw_pair()
    rank = dist.get_rank()
    train_both(plain, sharded, 1)
    with pytest.raises(NotConsolidatedError, match=rf"consolidate_state_dict\(to={rank}\)"):
        sharded.state_dict()
    sharded.consolidate_state_dict(to=0)
    first = sharded.state_dict() if rank == 0 else None
    expected = copy.deepcopy(plain.state_dict())
    sharded.consolidate_state_dict(to=1)
    if rank < 2:  # bringing it to rank 1 leaves rank 0's copy valid
        assert_same_state(sharded.state_dict(), expected)
    train_both(plain, sharded, 2, first=1)
    if rank < 2:
        with pytest.raises(NotConsolidatedError, match="after the state was consolidated"):
            sharded.state_dict()
    if first is not None:
        assert_same_state(first, expected)
        steps = {float(entries["step"]) for entries in first["state"].values()}
        assert steps == {1.0}
    sharded.consolidate_state_dict(to=0)
    if rank == 0:
        assert_same_state(sharded.state_dict(), plain.state_dict())
        sharded.state_dict()["state"][0].clear()
        assert_same_state(sharded.state_dict(), plain.state_dict())


def test_a_consolidated_dict_is_a_snapshot_and_stale_ones_raise(ranks: Ranks) -> None:
    ranks.run(check_staleness)


def check_targets() -> None:
    plain, sharded = adamw_pair()
    train_both(plain, sharded, 1)
    with pytest.raises(
        ValueError, match=r"group rank from 0 to 1 \(or a list of them, or None for all\), got 2"
    ):
        sharded.consolidate_state_dict(to=2)
    with pytest.raises(RankMismatchError, match=r"rank 0 has to=0; rank 1 has to=1"):
        sharded.consolidate_state_dict(to=dist.get_rank())
    train_both(plain, sharded, 1, first=1)


def test_a_wrong_target_raises_on_every_rank(ranks2: Ranks) -> None:
    ranks2.run(check_targets)


def snapshot_of(state_dict: dict[str, Any]) -> tuple[dict[str, Any], dict[int, tuple[int, int]]]:
    """A deep copy, and where every tensor lies and how often it was changed."""
    places = {
        id(v): (v.data_ptr(), v._version)
        for entries in state_dict["state"].values()
        for v in entries.values()
        if isinstance(v, Tensor)
    }
    return copy.deepcopy(state_dict), places


def check_load_leaves_the_dict() -> None:
    plain, sharded = adamw_pair()
    set_grads(plain.param_groups[0]["params"], 0)
    plain.step()
    given = copy.deepcopy(plain.state_dict())
    before, places = snapshot_of(given)
    sharded.load_state_dict(given)
    own = len(sharded.owned_parameters())
    assert len(sharded.state) == own
    for p, q in zip(sharded.param_groups[0]["params"], plain.param_groups[0]["params"], strict=True):
        p.data.copy_(q)
    train_both(plain, sharded, 2, first=1)
    assert_same_state(given, before)
    assert snapshot_of(given)[1] == places
    assert all(entry is not None for entry in given["state"].values())


def test_loading_leaves_the_dict_given_as_it_was(ranks: Ranks) -> None:
    ranks.run(check_load_leaves_the_dict)


def check_wrong_shapes() -> None:
    plain, sharded = adamw_pair()
    names = [f"block.{i}" for i in range(len(MIXED))]
    named = ZeroRedundancyOptimizer(
        list(zip(names, twin(make_params()), strict=True)), torch.optim.AdamW, lr=0.01
    )
    train_both(plain, sharded, 1)
    wrong = copy.deepcopy(plain.state_dict())
    wrong["state"][4]["exp_avg"] = torch.zeros(2, 12)
    wrong["state"][6]["exp_avg_sq"] = torch.zeros(3)
    for optimizer in (sharded, named):
        state_before = copy.deepcopy(dict(optimizer.state))
        with pytest.raises(StateMismatchError) as caught:
            optimizer.load_state_dict(wrong)
        expected = "'block.4'" if optimizer is named else "parameter 4 of group 0"
        assert expected in str(caught.value)
        assert "(12, 2)" in str(caught.value)
        assert "'exp_avg' has shape (2, 12)" in str(caught.value)
        assert "'exp_avg_sq' has shape (3,)" in str(caught.value)
        assert len(optimizer.state) == len(state_before)
    train_both(plain, sharded, 1, first=1)


def test_state_of_a_wrong_shape_names_every_parameter_and_changes_nothing(ranks2: Ranks) -> None:
    ranks2.run(check_wrong_shapes)


def check_wrong_dicts() -> None:
    plain, sharded = adamw_pair()
    train_both(plain, sharded, 1)
    other = torch.optim.AdamW(make_params(((2, 2), (3,))), lr=0.1).state_dict()
    with pytest.raises(StateMismatchError, match=r"groups of \[2\] parameters, this optimizer has \[8\]"):
        sharded.load_state_dict(other)
    with pytest.raises(StateMismatchError, match="expected a state dict with 'state' and 'param_groups'"):
        sharded.load_state_dict({"model": {}})
    mine = plain.state_dict() if dist.get_rank() == 0 else other
    with pytest.raises(StateMismatchError, match=r"groups of \[2\]"):
        sharded.load_state_dict(mine)
    train_both(plain, sharded, 2, first=1)


def test_a_dict_that_does_not_fit_on_one_rank_raises_on_all_and_changes_nothing(ranks2: Ranks) -> None:
    ranks2.run(check_wrong_dicts)


def check_options_loaded() -> None:
    plain, sharded = adamw_pair()
    given = plain.state_dict()
    given["param_groups"][0]["lr"] = 0.5
    del given["param_groups"][0]["maximize"]  # an old file
    sharded.load_state_dict(given)
    assert sharded.param_groups[0]["lr"] == 0.5
    assert sharded.param_groups[0]["maximize"] is False
    plain.load_state_dict(given)
    for p, q in zip(sharded.param_groups[0]["params"], plain.param_groups[0]["params"], strict=True):
        p.data.copy_(q)
    train_both(plain, sharded, 2)


def test_options_of_a_loaded_dict_count_and_gaps_are_filled_as_the_class_does(ranks2: Ranks) -> None:
    ranks2.run(check_options_loaded)


def check_hooks() -> None:
    plain, sharded = adamw_pair()
    called: list[str] = []
    sharded.register_step_pre_hook(lambda *_: called.append("step pre"))
    sharded.register_step_post_hook(lambda *_: called.append("step post"))
    sharded.register_state_dict_pre_hook(lambda o: called.append("state pre"))
    sharded.register_state_dict_post_hook(lambda o, d: {**d, "mark": len(d["state"])})
    sharded.register_load_state_dict_pre_hook(lambda o, d: {k: v for k, v in d.items() if k != "mark"})
    sharded.register_load_state_dict_post_hook(lambda o: called.append("load post"))
    train_both(plain, sharded, 1)
    sharded.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        assert sharded.state_dict()["mark"] == len(MIXED)
    sharded.load_state_dict({**plain.state_dict(), "mark": 1})
    expected = ["step pre", "step post", *(["state pre"] if dist.get_rank() == 0 else []), "load post"]
    assert called == expected


def test_step_state_and_load_hooks_fire_once_and_see_the_whole(ranks2: Ranks) -> None:
    ranks2.run(check_hooks)


class OddState(torch.optim.SGD):
    """SGD that keeps state of every kind, and a global entry."""

    def step(self, closure: Any = None) -> Any:
        self.state["count"] = self.state.get("count", 0) + 1
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].update(
                    nothing=None,
                    name="x",
                    small=torch.tensor(3, dtype=torch.int8),
                    mask=torch.ones(p.numel() + 1, dtype=torch.bool),
                    nested={"a": [torch.zeros(2, 3), (1, 2.5)], "b": OrderedDict(c=torch.ones(3, 2).t())},
                    moments=torch.zeros(2, dtype=torch.complex64),
                    half=p.detach().to(torch.bfloat16),
                    empty=torch.empty(0),
                )
        return super().step(closure)


def assert_same_value(got: Any, expected: Any) -> None:
    """Compare nested values: types, containers, bits of tensors."""
    assert type(got) is type(expected)
    if isinstance(expected, Tensor):
        assert got.dtype == expected.dtype
        assert got.stride() == expected.stride()
        assert torch.equal(got, expected)
    elif isinstance(expected, dict):
        assert list(got) == list(expected)
        for key in expected:
            assert_same_value(got[key], expected[key])
    elif isinstance(expected, list | tuple):
        for a, b in zip(got, expected, strict=True):
            assert_same_value(a, b)
    else:
        assert got == expected


def check_odd_state() -> None:
    params = make_params(MIXED[:5])
    mine = twin(params)
    plain = OddState(params, lr=0.1, momentum=0.9)
    sharded = ZeroRedundancyOptimizer(mine, OddState, lr=0.1, momentum=0.9)
    train_both(plain, sharded, 2)
    sharded.consolidate_state_dict(to=1)
    if dist.get_rank() == 1:
        got, expected = sharded.state_dict(), plain.state_dict()
        assert got["state"].keys() == expected["state"].keys()
        assert got["state"]["count"] == 2
        for index in range(5):
            assert_same_value(got["state"][index], expected["state"][index])
    given = plain.state_dict()
    for index in range(5):
        del given["state"][index]["moments"]  # torch.optim casts state to the parameter's dtype as it loads
    sharded.load_state_dict(given)
    assert sharded.state["count"] == 2
    if dist.get_rank() == 0:
        sharded.state[sharded.owned_parameters()[0]]["bad"] = object()
    with pytest.raises(TypeError, match=r"optimizer state\[\d\]\['bad'\] holds a object"):
        sharded.consolidate_state_dict(to=1)


def test_state_of_any_kind_is_consolidated_and_what_cannot_be_raises_everywhere(ranks2: Ranks) -> None:
    ranks2.run(check_odd_state)


def check_pieces() -> None:
    group = RankGroup.of(None)
    sizes = [3, PIECE_NBYTES // 4 + 5, 0, 1, PIECE_NBYTES // 2, 7]
    tensors = [torch.arange(size, dtype=torch.float32) for size in sizes]
    value = {"all": tensors, "sparse": torch.eye(4).to_sparse()}
    if group.rank == 0:
        send_value(group, [1], *encode(value, "value"))
    else:
        got = recv_value(group, 0)
        assert_same_bits(got["all"], tensors)
        assert torch.equal(got["sparse"].to_dense(), torch.eye(4))


def test_tensors_larger_than_a_piece_arrive_whole(ranks2: Ranks) -> None:
    ranks2.run(check_pieces)


def check_from_torch_zero() -> None:
    with warnings.catch_warnings():  # importing it scripts functions, which PyTorch itself deprecates
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero

    params = make_params()
    theirs = TorchZero(params, torch.optim.AdamW, lr=0.01)
    mine = twin(params)
    sharded = ZeroRedundancyOptimizer(mine, torch.optim.AdamW, lr=0.01)
    for step in range(2):
        set_grads(params, step)
        theirs.step()
    theirs.consolidate_state_dict(to=0)
    box = [theirs.state_dict() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box, src=0)
    assert box[0] is not None
    sharded.load_state_dict(box[0])
    for p, q in zip(mine, params, strict=True):
        p.data.copy_(q)
    train_both(theirs, sharded, 2, first=2)


def test_a_dict_of_torchs_zero_optimizer_loads(ranks2: Ranks) -> None:
    ranks2.run(check_from_torch_zero)


def check_several_targets() -> None:
    plain, sharded = adamw_pair()
    train_both(plain, sharded, 1)
    rank, size = dist.get_rank(), dist.get_world_size()
    sharded.consolidate_state_dict(to=[1, 0, 1])
    if rank < 2:
        assert_same_state(sharded.state_dict(), plain.state_dict())
    else:
        with pytest.raises(NotConsolidatedError):
            sharded.state_dict()
    sharded.consolidate_state_dict(to=None)
    assert_same_state(sharded.state_dict(), plain.state_dict())
    for wrong in ([], [0, size], "all", True):
        with pytest.raises(ValueError, match="expected to be a group rank"):
            sharded.consolidate_state_dict(to=wrong)  # type: ignore[arg-type]


def test_the_state_is_brought_to_several_ranks_or_all(ranks: Ranks) -> None:
    ranks.run(check_several_targets)


class Marked(Tensor):
    """A subclass with memory of its own, and an attribute."""


class Quantized(Tensor):
    """A subclass that wraps two tensors."""

    code: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls: type["Quantized"], code: Tensor, scale: Tensor) -> "Quantized":
        made = Tensor._make_wrapper_subclass(cls, code.shape, dtype=torch.float32)  # type: ignore[attr-defined]
        assert isinstance(made, Quantized)
        return made

    def __init__(self, code: Tensor, scale: Tensor) -> None:
        self.code, self.scale = code, scale

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["code", "scale"], {"kind": "int8"}

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> "Quantized":
        assert context == {"kind": "int8"}
        assert isinstance(size, torch.Size)
        return cls(inner["code"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function.overloadpacket in (torch.ops.aten.detach, torch.ops.aten.clone), function
        return cls(function(args[0].code), function(args[0].scale))


def check_subclasses() -> None:
    marked = torch.arange(3.0).as_subclass(Marked)
    marked.note = "kept"  # type: ignore[attr-defined]
    quantized = Quantized(torch.tensor([1, -2], dtype=torch.int8), torch.tensor(0.5))
    params = make_params()
    sharded = ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=0.1)
    for p in sharded.owned_parameters():
        sharded.state[p] = {"marked": marked, "quantized": quantized}
    nbytes = sharded.state_nbytes()
    assert nbytes >= 12 + 2 + 4
    sharded.consolidate_state_dict(to=None)
    for entries in copy.copy(sharded._snapshot.get(0)).values():
        assert type(entries["marked"]) is Marked
        assert entries["marked"].note == "kept"
        assert torch.equal(entries["marked"].as_subclass(Tensor), torch.arange(3.0))
        assert type(entries["quantized"]) is Quantized
        assert entries["quantized"].code.tolist() == [1, -2]
        assert entries["quantized"].scale.item() == 0.5


def test_tensor_subclasses_arrive_as_what_they_were(ranks2: Ranks) -> None:
    ranks2.run(check_subclasses)


def check_known_on_rank_0_only(to: int | None) -> None:
    rank, known = dist.get_rank(), Marked
    sharded = ZeroRedundancyOptimizer(make_params(), torch.optim.SGD, lr=0.1)
    whole = copy.deepcopy(sharded.state_dict()) if rank == 0 else None
    if rank == 0:
        for p in sharded.owned_parameters():
            sharded.state[p] = {"marked": torch.ones(3).as_subclass(known)}
        assert whole is not None
        whole["state"] = {key: {"marked": torch.ones(3).as_subclass(known)} for key in range(5)}
    else:
        delattr(sys.modules[__name__], "Marked")  # as if its module had not been imported
    try:
        before = "" if rank == 1 else "rank 1: "
        expected = rf"^{before}a value needs the tensor subclass \w+\.Marked: import \w+ first"
        with pytest.raises(TypeError, match=expected):
            sharded.consolidate_state_dict(to=to)
        with pytest.raises(TypeError, match=expected):
            sharded.load_state_dict(whole, src=0)
        group = RankGroup.of(None)
        assert group.all_gather_fixed(bytes([rank])) == [b"\0", b"\1"]  # nothing is left to be received
    finally:
        vars(sys.modules[__name__])["Marked"] = known


@pytest.mark.parametrize("to", [1, None], ids=["to one", "to all"])
def test_a_subclass_that_one_rank_has_not_imported_raises_on_every_rank(
    ranks2: Ranks, to: int | None
) -> None:
    ranks2.run(check_known_on_rank_0_only, to)


def test_a_subclass_that_nobody_has_imported_is_not_looked_for() -> None:
    skeleton, tensors = encode(torch.ones(2).as_subclass(Marked), "value")
    skeleton[1][0] = ["antigravity", "Tensor"]
    with pytest.raises(TypeError, match="import antigravity first"):
        decode(skeleton, iter(tensors))
    skeleton[1][0] = ["os", "system"]
    with pytest.raises(TypeError, match=r"tensor subclass os\.system"):
        decode(skeleton, iter(tensors))


def test_looking_for_a_subclass_makes_no_module_import_what_it_imports_when_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []
    lazy = ModuleType("lazy")
    lazy.__getattr__ = lambda name: asked.append(name) or Marked  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "lazy", lazy)
    skeleton, tensors = encode(torch.ones(2).as_subclass(Marked), "value")
    skeleton[1][0] = ["lazy", "Anything"]
    with pytest.raises(TypeError, match=r"tensor subclass lazy\.Anything"):
        decode(skeleton, iter(tensors))
    assert asked == []


def check_dealt_out() -> None:
    plain, sharded = adamw_pair()
    train_both(plain, sharded, 1)
    other = ZeroRedundancyOptimizer(twin(make_params()), torch.optim.AdamW, lr=0.5)
    rank = dist.get_rank()
    given = plain.state_dict() if rank == 1 else None
    before = copy.deepcopy(given)
    other.load_state_dict(given, src=1)
    if given is not None and before is not None:
        assert_same_state(given, before)
    assert other.param_groups[0]["lr"] == 0.01
    assert len(other.state) == len(other.owned_parameters())
    for p, q in zip(other.param_groups[0]["params"], plain.param_groups[0]["params"], strict=True):
        p.data.copy_(q)
    train_both(plain, other, 2, first=1)
    for dictionary, src, text in (
        (plain.state_dict(), 0, "only rank 0 gives a state dict"),
        (None, 0, "expected a state dict, got None"),
        (None, 7, "expected src to be a group rank"),
    ):
        with pytest.raises(ValueError, match=text):
            other.load_state_dict(dictionary, src=src)
    with pytest.raises(RankMismatchError, match="src="):
        other.load_state_dict(plain.state_dict(), src=rank)
    wrong = {"state": {}, "param_groups": []} if rank == 0 else None
    with pytest.raises(StateMismatchError, match="groups of"):
        other.load_state_dict(wrong, src=0)


def test_a_dict_that_one_rank_has_is_dealt_out(ranks: Ranks) -> None:
    ranks.run(check_dealt_out)


def grown(numel: int) -> int:
    """MiB by which memory grows at its peak on a rank that receives its part."""
    params = [torch.zeros(numel, requires_grad=True) for _ in range(8)]
    sharded = ZeroRedundancyOptimizer(params, torch.optim.AdamW)
    whole = None
    if dist.get_rank() == 0:
        state = {i: {"step": torch.ones(()), **{k: torch.ones(numel) for k in KEYS}} for i in range(8)}
        whole = {"state": state, "param_groups": torch.optim.AdamW(params).state_dict()["param_groups"]}
    dist.barrier()
    forget_peak()
    before = resident_nbytes()
    sharded.load_state_dict(whole, src=0)
    assert all(float(entries["exp_avg"][-1]) == 1 for entries in sharded.state.values())
    return (peak_nbytes() - before) // 2**20


KEYS = ("exp_avg", "exp_avg_sq")


def test_a_rank_that_is_dealt_its_part_grows_by_little_more(ranks4: Ranks) -> None:
    if sys.platform != "linux":
        pytest.skip("memory is measured as Linux tells it")
    for growth in ranks4.run(grown, 2 * 2**20)[1:]:
        assert growth <= 32 + 64  # MiB: two of eight parameters with two moments of 8 MiB each, and 64


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def drawn(monkeypatch: pytest.MonkeyPatch, stderr: io.StringIO, patience: float) -> str:
    """What a bar has drawn by the time that half is done, if it is drawn after so many seconds."""
    monkeypatch.setattr(progress, "_PATIENCE", patience)
    monkeypatch.setattr(sys, "stderr", stderr)
    with progress.progress("consolidating", 4 * 2**20) as advance:
        advance(2**21)
        return stderr.getvalue()


def test_a_bar_is_drawn_on_a_terminal_once_some_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "consolidating" in drawn(monkeypatch, Terminal(), patience=0)
    assert drawn(monkeypatch, Terminal(), patience=3600) == ""
    assert drawn(monkeypatch, io.StringIO(), patience=0) == ""


def test_without_tqdm_there_is_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert drawn(monkeypatch, Terminal(), patience=0) == ""
