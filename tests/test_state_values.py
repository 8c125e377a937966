"""Values of every kind in the state: what can be sent arrives as what it was, the rest raises everywhere."""

import copy
import sys
from collections import OrderedDict
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pool import on_ranks
from training import MIXED, assert_same_value, make_params, pair_of, sgd, train_both
from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.encoding import decode, encode


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


@on_ranks(2)
def test_state_of_any_kind_is_consolidated_and_what_cannot_be_raises_everywhere() -> None:
    plain, sharded = pair_of(OddState, make_params(MIXED[:5]), lr=0.1, momentum=0.9)
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


class Marked(Tensor):
    """A subclass with memory of its own, and an attribute."""


class Quantized(Tensor):
    """A subclass that wraps two tensors."""

    code: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls: type["Quantized"], code: Tensor, scale: Tensor) -> "Quantized":
        return Tensor._make_wrapper_subclass(cls, code.shape, dtype=torch.float32)  # type: ignore[attr-defined]

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


@on_ranks(2)
def test_tensor_subclasses_arrive_as_what_they_were() -> None:
    marked = torch.arange(3.0).as_subclass(Marked)
    marked.note = "kept"  # type: ignore[attr-defined]
    quantized = Quantized(torch.tensor([1, -2], dtype=torch.int8), torch.tensor(0.5))
    sharded = sgd()
    for p in sharded.owned_parameters():
        sharded.state[p] = {"marked": marked, "quantized": quantized}
    nbytes = sharded.state_nbytes()
    assert nbytes >= 12 + 2 + 4
    sharded.consolidate_state_dict(to=None)
    for entries in copy.copy(sharded.core.snapshot.get(0)).values():
        assert type(entries["marked"]) is Marked
        assert entries["marked"].note == "kept"
        assert torch.equal(entries["marked"].as_subclass(Tensor), torch.arange(3.0))
        assert type(entries["quantized"]) is Quantized
        assert entries["quantized"].code.tolist() == [1, -2]
        assert entries["quantized"].scale.item() == 0.5


@on_ranks(2)
def test_a_subclass_that_one_rank_has_not_imported_raises_on_every_rank() -> None:
    rank, known = dist.get_rank(), Marked
    sharded = sgd()
    whole = copy.deepcopy(sharded.state_dict()) if rank == 0 else None
    if rank == 0:
        for p in sharded.owned_parameters():
            sharded.state[p] = {"marked": torch.ones(3).as_subclass(known)}
        whole["state"] = {key: {"marked": torch.ones(3).as_subclass(known)} for key in range(5)}
    else:
        delattr(sys.modules[__name__], "Marked")  # as if its module had not been imported
    try:
        before = "" if rank == 1 else "rank 1: "
        expected = rf"^{before}a value needs the tensor subclass \w+\.Marked: import \w+ first"
        with pytest.raises(TypeError, match=expected):
            sharded.consolidate_state_dict(to=None)
        with pytest.raises(TypeError, match=expected):
            sharded.load_state_dict(whole, src=0)
        group = RankGroup.of(None)
        assert group.all_gather_fixed(bytes([rank])) == [b"\0", b"\1"]  # nothing is left to be received
    finally:
        vars(sys.modules[__name__])["Marked"] = known


def test_a_subclass_is_looked_for_only_in_what_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a module import what it would import when asked."""
    asked = []
    lazy = ModuleType("lazy")
    lazy.__getattr__ = lambda name: asked.append(name) or Marked  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "lazy", lazy)
    skeleton, tensors = encode(torch.ones(2).as_subclass(Marked), "value")
    for path, match in (
        (["antigravity", "Tensor"], "import antigravity first"),
        (["os", "system"], r"tensor subclass os\.system"),
        (["lazy", "Anything"], r"tensor subclass lazy\.Anything"),
    ):
        skeleton[1][0] = path
        with pytest.raises(TypeError, match=match):
            decode(skeleton, iter(tensors))
    assert asked == []
