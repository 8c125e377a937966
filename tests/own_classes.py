"""Optimizer classes of our own, each with one habit that the library has to find out by trying."""

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer


class Small(Optimizer):
    """The usual shape of an optimizer; those below say what they do with one parameter, or with all.

    Attributes:
        options: of a class, beside the rate.
    """

    options: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, {"lr": 0.1, **self.options, **options})

    def each(self) -> Iterator[tuple[dict[str, Any], Any]]:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    yield group, p

    def update(self, p: Any, group: dict[str, Any]) -> None:
        p.add_(p.grad, alpha=-group["lr"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.step_all()

    def step_all(self) -> None:
        for group, p in self.each():
            self.update(p, group)


# ---------------------------------------------------------------------- state saved in ways of their own


class WarmsUp(Small):
    """Saves the number of its steps beside its state, as SPAM and StableSPAM do."""

    steps = 0

    def step_all(self) -> None:
        self.steps += 1
        for group, p in self.each():
            p.add_(p.grad / self.steps, alpha=-group["lr"])

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.steps = state_dict["steps"]


class Forgets(WarmsUp):
    """Does not load what it saves."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        Small.load_state_dict(self, state_dict)


class CountsWhatItHas(WarmsUp):
    """Saves beside its state what depends on the parameters it has."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "seen": len(self.state), "own": len(list(self.each()))}


class Nests(Small):
    """Saves its momentum one level deeper than it keeps it, as bitsandbytes' classes do."""

    def update(self, p: Any, group: dict[str, Any]) -> None:
        state = self.state[p]
        state["m"] = state["m"] * 0.9 + p.grad if state else p.grad.clone()
        p.add_(state["m"], alpha=-group["lr"])

    def state_dict(self) -> dict[str, Any]:
        packed = super().state_dict()
        return {**packed, "state": {key: {"nested": dict(held)} for key, held in packed["state"].items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = {key: held.get("nested", held) for key, held in state_dict["state"].items()}
        super().load_state_dict({**state_dict, "state": state})


class Projector:
    """Keeps the first gradient, as GaLore's keeps a projection."""

    def __init__(self, grad: Tensor, sort: "Sort") -> None:
        self.first, self.sort, self.shape = grad.clone(), sort, grad.shape


class Sort(Enum):
    """An option of a projector."""

    SIGN = "sign"
    FULL = "full"


class KeepsObjects(Small):
    """Keeps an object and a queue for each parameter."""

    def update(self, p: Any, group: dict[str, Any]) -> None:
        state = self.state[p]
        if not state:
            state.update(projector=Projector(p.grad, Sort.FULL), last=deque())
        state["last"].append(p.grad.clone())
        if len(state["last"]) > 3:
            state["last"].popleft()  # torch.optim loses a maximum length in load_state_dict
        p.add_(state["projector"].first * len(state["last"]) + state["last"][0], alpha=-group["lr"])


class KeepsLocks(Small):
    """Keeps what cannot be saved."""

    def update(self, p: Any, group: dict[str, Any]) -> None:
        self.state[p]["lock"] = threading.Lock()
        super().update(p, group)


class WritesDown(Small):
    """Writes what it has into its groups, and a count into the state of the first parameter; may use it."""

    options = MappingProxyType({"uses": "", "begin": 50})

    def step_all(self) -> None:
        for group in self.param_groups:
            members = [p for of, p in self.each() if of is group]
            group.setdefault("numel", sum(p.numel() for p in group["params"]))
            group["count"] = group.get("count", 0) + 1
            if members:
                group["count"] = torch.as_tensor(group["count"])
                group["norm"] = float(torch.stack([p.grad.norm() for p in members]).norm())
                self.state[members[0]]["count"] = int(group["count"])
            for p in members:
                m = self.state[p].setdefault("m", torch.zeros_like(p)).mul_(0.9).add_(p.grad)
                p.sub_(m * group["lr"] / group["count"] / self.scale(group, self.state[p]))

    def scale(self, group: dict[str, Any], state: dict[str, Any]) -> float:
        if group["uses"] == "numel":
            return 2.0 if group["numel"] > 10**6 else 1.0
        if group["uses"] == "norm":
            return 1 + group["norm"] if group["count"] > group["begin"] else 1.0
        return 2.0 if group["uses"] == "count" and state.get("count", 0) > 10**6 else 1.0


# ---------------------------------------------------------------------- parameters that are not stepped apart


class CouplesLarge(Small):
    """Scales by a common norm, but only parameters above a size."""

    options = MappingProxyType({"above": 4096})

    def step_all(self) -> None:
        large = [p.grad.square().sum() for group, p in self.each() if p.numel() >= group["above"]]
        for group, p in self.each():
            total = sum(large, torch.zeros(())).sqrt() if p.numel() >= group["above"] else torch.ones(())
            p.add_(p.grad / total, alpha=-group["lr"])


class CouplesLate(Small):
    """Scales by a common norm, but only from a step on."""

    options = MappingProxyType({"begin": 50, "count": 0})

    def step_all(self) -> None:
        total = sum((p.grad.square().sum() for _, p in self.each()), torch.zeros(())).sqrt()
        for group in self.param_groups:
            group["count"] += 1
        for group, p in self.each():
            p.add_(p.grad / (total if group["count"] > group["begin"] else 1), alpha=-group["lr"])


class Noise(Small):
    """Draws from a generator of its own for one parameter after the other; nobody can seed it, or all do."""

    def __init__(self, params: Any, seed: int | None = 0, **options: Any) -> None:
        super().__init__(params, **options)
        self.generator = np.random.default_rng(seed)

    def update(self, p: Any, group: dict[str, Any]) -> None:
        p.add_(p.grad * float(self.generator.random()), alpha=-group["lr"])


class StateByIndex(Small):
    """Keeps momentum under the place of a parameter in the whole list, in ``state`` or in an attribute."""

    def __init__(self, params: Any, in_state: bool = True, **options: Any) -> None:
        super().__init__(params, **options)
        self.in_state, self.buffers = in_state, {}

    def step_all(self) -> None:
        kept: Any = self.state if self.in_state else self.buffers
        every = [(group, p) for group in self.param_groups for p in group["params"]]
        for index, (group, p) in enumerate(every):
            if p.grad is not None:
                kept[index] = kept[index] * 0.9 + p.grad if index in kept else p.grad.clone()
                p.add_(kept[index], alpha=-group["lr"])


class ClipsGlobally(Small):
    """Scales all gradients by their common norm, when it is above a threshold."""

    options = MappingProxyType({"max_norm": 1.0})

    def step_all(self) -> None:
        total = sum((p.grad.square().sum() for _, p in self.each()), torch.zeros(())).sqrt()
        for group, p in self.each():
            p.add_(p.grad * (group["max_norm"] / total).clamp(max=1), alpha=-group["lr"])


class GlobalCounter(Small):
    """Decays by steps it counts in an entry of the state that is no parameter's."""

    def step_all(self) -> None:
        k = self.state["k"] = self.state.get("k") or torch.zeros(())
        k += 1
        for group, p in self.each():
            p.sub_(p.grad * group["lr"] / k)


class GroupCoupled(Small):
    """Groups after the first are damped when the first has large gradients."""

    def step_all(self) -> None:
        first = [p.grad.abs().max() for p in self.param_groups[0]["params"] if p.grad is not None]
        damp = 0.1 if any(size > 100 for size in first) else 1.0
        for group, p in self.each():
            p.add_(p.grad, alpha=-group["lr"] * (1.0 if group is self.param_groups[0] else damp))


class StacksEqualShapes(Small):
    """Normalises parameters of equal shape together."""

    def step_all(self) -> None:
        by_shape: dict[torch.Size, list[Tensor]] = {}
        for _, p in self.each():
            by_shape.setdefault(p.shape, []).append(p)
        for members in by_shape.values():
            together = torch.stack([p.grad for p in members])
            for p, update in zip(members, together / (together.norm() + 1e-8), strict=True):
                p.sub_(update)


class BlocksAcross(Small):
    """Scales by the largest of every 256 elements of all gradients in a row, if there are enough."""

    options = MappingProxyType({"least": 0})

    def step_all(self) -> None:
        every = list(self.each())
        flat = torch.cat([torch.zeros(0), *(p.grad.reshape(-1) for _, p in every)])
        rows = torch.nn.functional.pad(flat, (0, -len(flat) % 256)).reshape(-1, 256)
        largest = rows.abs().amax(1, keepdim=True).clamp(min=1e-30)
        scaled = (rows / largest).reshape(-1) if len(flat) >= self.defaults["least"] else flat
        for group, p in every:
            p.sub_(scaled[: p.numel()].reshape(p.shape), alpha=group["lr"])
            scaled = scaled[p.numel() :]


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "torch": torch.randn_like,
    "numpy": lambda p: torch.from_numpy(np.random.standard_normal(tuple(p.shape))).to(p.dtype),
    "python": lambda p: torch.full_like(p, random.gauss(0, 1)),
}


class Langevin(Small):
    """Adds noise, from the global random numbers of one library or another."""

    options = MappingProxyType({"source": "torch", "unused": None})

    def update(self, p: Any, group: dict[str, Any]) -> None:
        p.add_(p.grad, alpha=-group["lr"]).add_(DRAWS[group["source"]](p), alpha=1e-2)


class RoundsStochastically(Small):
    """Draws random numbers for half-precision parameters alone."""

    def draws(self, p: Any) -> bool:
        return bool(p.dtype == torch.bfloat16)

    def update(self, p: Any, group: dict[str, Any]) -> None:
        noise = torch.rand_like(p) * 1e-2 if self.draws(p) else 0.0
        p.sub_((p.grad + noise) * group["lr"])


class RoundsLarge(RoundsStochastically):
    """Draws them for large parameters alone."""

    def draws(self, p: Any) -> bool:
        return bool(p.numel() >= 4096)


class LeavesMemoryUnwritten(Small):
    """In bfloat16, its state differs between equal runs, and it may also clip all gradients together."""

    count = 0

    def step_all(self) -> None:
        half = [p for _, p in self.each() if p.dtype == torch.bfloat16]
        norm = sum((float(p.grad.float().norm()) for p in half), 1.0)
        for group, p in self.each():
            if p.dtype == torch.bfloat16:
                type(self).count += 1
                self.state[p]["unwritten"] = torch.tensor(self.count)
            p.add_(p.grad / norm if group["clips"] else p.grad, alpha=-group["lr"])


# ---------------------------------------------------------------------- steps that need or change something


class ScheduleFree(Small):
    """Counts its steps in the group; has to be told its mode."""

    options = MappingProxyType({"train_mode": False, "k": 0})

    def train(self, mode: bool = True) -> None:
        for group in self.param_groups:
            group["train_mode"] = mode

    def eval(self) -> None:
        self.train(mode=False)

    def step_all(self) -> None:
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("call train() first")
            group["k"] += 1
        for group, p in self.each():
            self.update(p, {"lr": group["lr"] / group["k"]})


class SharpnessAware(Small):
    """Needs a closure, though its signature does not say so."""

    def step(self, closure: Any = None) -> None:
        assert closure is not None, "needs a closure"
        with torch.enable_grad():
            closure()
        super().step()


class OnGpuOnly(Small):
    """Raises on the CPU."""

    def step(self, closure: Any = None) -> None:
        raise RuntimeError("expected CUDA tensors")


class NeverMoves(Small):
    """Warms up for longer than anything is tried."""

    def step(self, closure: Any = None) -> None:
        pass


class ChangesItsRate(Small):
    """Changes in place the tensor it was given as rate."""

    def step_all(self) -> None:
        for group, p in self.each():
            p.sub_(p.grad * group["lr"])
        for group in self.param_groups:
            group["lr"].mul_(0.9)


class Counted(Small):
    """Counts how often it was built."""

    built = 0

    def __init__(self, params: Any, **options: Any) -> None:
        type(self).built += 1
        super().__init__(params, **options)


# ---------------------------------------------------------------------- rows that are not stepped apart


class LargeFactored(Small):
    """Divides by row means, but only for matrices of 128 rows and columns."""

    def update(self, p: Any, group: dict[str, Any]) -> None:
        factored = p.dim() == 2 and min(p.shape) >= 128
        scale = p.grad.square().mean(1, keepdim=True).sqrt() + 1e-8 if factored else 1.0
        p.sub_(group["lr"] * p.grad / scale)


class RemembersItsSize(Small):
    """Steps element by element, but keeps a number that differs between a parameter and its rows."""

    def update(self, p: Any, group: dict[str, Any]) -> None:
        super().update(p, group)
        self.state[p]["numel"] = p.numel()


class Replaces(Small):
    """Replaces its state by a new tensor in every step, once as a list."""

    def update(self, p: Any, group: dict[str, Any]) -> None:
        state = self.state[p]
        state["history"] = [p.grad.clone(), *state.get("history", [])][:3]
        state["step"] = state.get("step", 0) + 1
        p.sub_(sum(state["history"], torch.zeros_like(p)), alpha=group["lr"])


class RoundsAtTheEnd(Small):
    """Its own kernel treats the end of a vector otherwise; the one it calls fused does too."""

    def update(self, p: Any, group: dict[str, Any]) -> None:
        flat, grad = p.view(-1), p.grad.reshape(-1)
        full = p.numel() // 16 * 16  # 64 bytes
        flat[:full].sub_(grad[:full], alpha=group["lr"])
        flat[full:].sub_(grad[full:] * (group["lr"] * 1.01))


class NormedBy(Small):
    """Divides by the norm of the parameter, if an option says so."""

    options = MappingProxyType({"trust": False})

    def update(self, p: Any, group: dict[str, Any]) -> None:
        p.sub_(p.grad / (p.norm() + 1) if group["trust"] else p.grad, alpha=group["lr"])


class Counts(NormedBy):
    """Counts in its group, which takes no fraction; trusts where the weight decays."""

    def step_all(self) -> None:
        for group in self.param_groups:
            if type(group["k"]) is not int:
                raise TypeError("k counts")
            group["k"] += 1
            if "weight_decay" in group:
                group["trust"] = bool(group["weight_decay"])
        super().step_all()


class InBlocks(Tensor):
    """State in whole numbers, one scale for each block of elements, as libraries for 8-bit state keep it."""

    @staticmethod
    def __new__(cls: Any, codes: Tensor, scale: Tensor) -> "InBlocks":
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)  # type: ignore[attr-defined]

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes = codes
        self.scale = scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: None, *_: Any) -> "InBlocks":
        return InBlocks(inner["codes"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        raise NotImplementedError(func)

    @classmethod
    def of(cls, value: Tensor, block: int) -> "InBlocks":
        blocks = value.reshape(-1, block)
        scale = blocks.abs().amax(1, keepdim=True).clamp(min=1e-12)
        return cls((blocks / scale * 127).round().to(torch.int8).reshape(value.shape), scale)

    def whole(self) -> Tensor:
        return (self.codes.reshape(len(self.scale), -1) * (self.scale / 127)).reshape(self.codes.shape)


class Quantized(Small):
    """Keeps its momentum in blocks, where the elements fill blocks and are enough to be worth it.

    As torchao's and bitsandbytes' classes. Since it steps with the momentum before it is rounded, the first
    step shows nothing.
    """

    def __init__(self, params: Any, block: int = 256, least: int = 4096, wraps: bool = True) -> None:
        super().__init__(params)
        self.block, self.least, self.wraps = block, least, wraps

    def update(self, p: Any, group: dict[str, Any]) -> None:
        before = self.state[p].get("momentum", torch.zeros_like(p))
        now = (before.whole() if isinstance(before, InBlocks) else before) * 0.9 + p.grad
        p.sub_(now, alpha=group["lr"])
        if p.numel() >= self.least and p.numel() % self.block == 0:
            kept = InBlocks.of(now, self.block)
            now = kept if self.wraps else kept.whole()
        self.state[p]["momentum"] = now


class WrapsAll(Quantized):
    """Wraps its state however few elements there are, in blocks of one: it bears cuts, but for its state."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, block=1, least=0)
