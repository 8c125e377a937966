"""What the library finds out about optimizer classes by trying them."""

import functools
import gc
import inspect
import random
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch_optimizer
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from training import needs_muon
from zero_optim.probe.probe import probe
from zero_optim.probe.shaped import ShapedKeys
from zero_optim.probe.traits import Traits, refusal

# ------------------------------------------------------------------ classes of our own


class Small(Optimizer):
    """The usual shape of an optimizer; those below say what they do with one parameter."""

    def __init__(self, params: Any, **defaults: Any) -> None:
        super().__init__(params, {"lr": 0.1, **defaults})

    def each(self) -> Iterator[tuple[dict[str, Any], Tensor]]:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    yield group, p

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, p in self.each():
            p.add_(p.grad, alpha=-group["lr"])


class ClipsGlobally(Small):
    """Scales all gradients by their common norm, when it is above a threshold."""

    def __init__(self, params: Any, max_norm: float = 1.0, **options: Any) -> None:
        super().__init__(params, max_norm=max_norm, **options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        total = sum((p.grad.square().sum() for _, p in self.each()), torch.zeros(())).sqrt()
        for group, p in self.each():
            p.add_(p.grad * (group["max_norm"] / total).clamp(max=1), alpha=-group["lr"])


class DAdaptation(Small):
    """Estimates one distance per group from inner products over all its parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group.setdefault("d", 1e-6)
            group.setdefault("numerator", 0.0)
            norm = 0.0
            for p in group["params"]:
                if p.grad is None:
                    continue
                s = self.state[p].setdefault("s", torch.zeros_like(p))
                group["numerator"] += group["d"] * float((p.grad * s).sum())
                s.add_(p.grad, alpha=group["d"])
                norm += float(s.norm() ** 2)
            group["d"] = max(group["d"], group["numerator"] / (norm**0.5 + 1e-12))
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad.sign(), alpha=-group["lr"] * group["d"])


class Prodigy(Small):
    """Hides its distance in an attribute of its own, over all groups."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.d = getattr(self, "d", 1e-6)
        moved = 0.0
        for _, p in self.each():
            first = self.state[p].setdefault("p0", p.clone())
            moved = max(moved, float((p.grad * (first - p)).sum()))
        self.d = max(self.d, min(moved, 1e-2))
        for group, p in self.each():
            p.add_(p.grad.sign(), alpha=-group["lr"] * self.d)


class GlobalCounter(Small):
    """Decays by steps it counts in an entry of the state that is no parameter's."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        k = self.state["k"] = self.state.get("k") or torch.zeros(())
        k += 1
        for group, p in self.each():
            p.sub_(p.grad * group["lr"] / k)


class GroupCoupled(Small):
    """Groups after the first are damped when the first has large gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        first = [p.grad.abs().max() for p in self.param_groups[0]["params"] if p.grad is not None]
        damp = 0.1 if any(size > 100 for size in first) else 1.0
        for number, group in enumerate(self.param_groups):
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] * (damp if number else 1.0))


class Langevin(Small):
    """Adds noise, from the global random numbers of one library or another."""

    def __init__(self, params: Any, source: str = "torch", unused: object = None) -> None:
        super().__init__(params, source=source)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, p in self.each():
            draw = {"torch": torch.randn_like, "numpy": _numpy_normal, "python": _python_normal}[
                group["source"]
            ]
            p.add_(p.grad, alpha=-group["lr"]).add_(draw(p), alpha=1e-2)


def _numpy_normal(p: Tensor) -> Tensor:
    return torch.from_numpy(np.random.standard_normal(tuple(p.shape))).to(p.dtype)


def _python_normal(p: Tensor) -> Tensor:
    return torch.full_like(p, random.gauss(0, 1))


class OwnNoise(Small):
    """Noise of a generator that nobody can seed."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.numbers = np.random.default_rng()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, p in self.each():
            p.add_(p.grad, alpha=-group["lr"] * float(self.numbers.uniform()))


class RoundsStochastically(Small):
    """Draws random numbers for half-precision parameters alone."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, p in self.each():
            noise = torch.rand_like(p) * 1e-2 if p.dtype == torch.bfloat16 else 0.0
            p.sub_((p.grad + noise) * group["lr"])


class ScheduleFree(Small):
    """Averages its iterates, with weights counted in the group; has to be told its mode."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, train_mode=False, k=0, weight_sum=0.0)

    def _blend(self, weight: float, mode: bool) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if group["train_mode"] != mode and "z" in self.state[p]:
                    p.data.lerp_(self.state[p]["z"], weight)
            group["train_mode"] = mode

    def train(self) -> None:
        self._blend(0.1, True)

    def eval(self) -> None:
        self._blend(1 - 1 / 0.9, False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("call train() first")
            group["k"] += 1
            group["weight_sum"] += group["lr"] ** 2 * group["k"]
            share = group["lr"] ** 2 * group["k"] / group["weight_sum"]
            for p in group["params"]:
                if p.grad is not None:
                    z = self.state[p].setdefault("z", p.clone())
                    p.lerp_(z, share).add_(p.grad, alpha=-0.1 * group["lr"])
                    z.sub_(p.grad, alpha=group["lr"])


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


class LargeFactored(Small):
    """Divides by row means, but only for matrices of 128 rows and columns."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, p in self.each():
            factored = p.dim() == 2 and min(p.shape) >= 128
            scale = p.grad.square().mean(1, keepdim=True).sqrt() + 1e-8 if factored else 1.0
            p.sub_(group["lr"] * p.grad / scale)


class StacksEqualShapes(Small):
    """Normalises parameters of equal shape together."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        by_shape: dict[torch.Size, list[Tensor]] = {}
        for _, p in self.each():
            by_shape.setdefault(p.shape, []).append(p)
        for members in by_shape.values():
            together = torch.stack([p.grad for p in members])
            for p, update in zip(members, together / (together.norm() + 1e-8), strict=True):
                p.sub_(update)


class ChangesItsRate(Small):
    """Changes in place the tensor it was given as rate."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, p in self.each():
            p.sub_(p.grad * group["lr"])
        for group in self.param_groups:
            group["lr"].mul_(0.9)


def lookahead(params: Any, **options: Any) -> Optimizer:
    return torch_optimizer.Lookahead(torch.optim.AdamW(params, **options))


# ------------------------------------------------------------------ the table

ALL, WHOLE, UNCOUNTED, NONE = "SPE", "SP-", "S-E", "---"
"""S separable, P steppable in parts, E element-wise."""

Row = tuple[Callable[..., Optimizer], dict[str, Any], str]

TORCH: dict[str, str] = {
    "Adadelta": ALL,
    "Adafactor": WHOLE,
    "Adagrad": ALL,
    "Adam": ALL,
    "AdamW": ALL,
    "Adamax": ALL,
    "ASGD": ALL,
    "LBFGS": NONE,
    "Muon": WHOLE,
    "NAdam": ALL,
    "RAdam": ALL,
    "RMSprop": ALL,
    "Rprop": ALL,
    "SGD": ALL,
    "SparseAdam": WHOLE,
}
TORCH_OPTIMIZER: dict[str, str] = {
    "A2GradExp": WHOLE,
    "A2GradInc": WHOLE,
    "A2GradUni": WHOLE,
    "AccSGD": ALL,
    "AdaBelief": ALL,
    "AdaBound": ALL,
    "Adafactor": WHOLE,
    "Adahessian": NONE,
    "AdaMod": ALL,
    "AdamP": WHOLE,
    "AggMo": ALL,
    "Apollo": WHOLE,
    "DiffGrad": ALL,
    "Lamb": WHOLE,
    "LARS": ALL,  # without weight decay it is SGD
    "Lookahead": UNCOUNTED,
    "MADGRAD": "S--",  # cut, its powers are rounded differently at the end of a vector
    "NovoGrad": WHOLE,
    "PID": ALL,
    "QHAdam": ALL,
    "QHM": ALL,
    "RAdam": ALL,
    "Ranger": ALL,
    "RangerQH": ALL,
    "RangerVA": WHOLE,  # cut, its softplus is rounded differently at the end of a vector
    "SGDP": WHOLE,
    "SGDW": ALL,
    "Shampoo": WHOLE,
    "SWATS": NONE,
    "Yogi": ALL,
}
CONDITIONAL: dict[str, Row] = {
    "LARS with decay": (torch_optimizer.LARS, {"lr": 0.1, "weight_decay": 1e-4}, WHOLE),
    "AdamP with decay": (torch_optimizer.AdamP, {"lr": 1e-3, "weight_decay": 0.01}, WHOLE),
    "SGDP": (torch_optimizer.SGDP, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}, WHOLE),
    **{f"SWATS, lr={lr}": (torch_optimizer.SWATS, {"lr": lr}, NONE) for lr in (1e-4, 1e-3, 1e-2, 0.1, 1.0)},
    "SWATS with decay": (torch_optimizer.SWATS, {"weight_decay": 0.01, "nesterov": True}, NONE),
    "SWATS as asked": (torch_optimizer.SWATS, {"eps": 1e-8, "amsgrad": True}, NONE),
    "AdaBelief rectified": (torch_optimizer.AdaBelief, {"rectify": True, "weight_decouple": True}, ALL),
    "MADGRAD without momentum": (torch_optimizer.MADGRAD, {"momentum": 0.0}, "S--"),
    "Lookahead": (lookahead, {"lr": 1e-2}, UNCOUNTED),
    "AdamW": (torch.optim.AdamW, {"lr": 3e-4, "betas": (0.9, 0.95), "amsgrad": True}, ALL),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-4}, ALL),
    "RMSprop": (torch.optim.RMSprop, {"centered": True, "momentum": 0.9}, ALL),
    "clips": (ClipsGlobally, {}, NONE),
    "clips late": (ClipsGlobally, {"max_norm": 1e3}, NONE),
    "D-adaptation": (DAdaptation, {}, NONE),
    "Prodigy": (Prodigy, {"lr": 1.0}, NONE),
    "global counter": (GlobalCounter, {}, "S-"),
    "groups": (GroupCoupled, {}, NONE),
    "stacks": (StacksEqualShapes, {}, NONE),
    "noise": (Langevin, {}, NONE),
    "numpy noise": (Langevin, {"source": "numpy"}, NONE),
    "python noise": (Langevin, {"source": "python"}, NONE),
    "own noise": (OwnNoise, {}, NONE),
    "stochastic rounding": (RoundsStochastically, {}, NONE),
    "schedule-free": (ScheduleFree, {}, "S-"),
    "closure": (SharpnessAware, {}, NONE),
    "GPU only": (OnGpuOnly, {}, NONE),
    "still": (NeverMoves, {}, NONE),
    "large": (LargeFactored, {}, WHOLE),
    "small": (Small, {}, ALL),
    "rate in place": (ChangesItsRate, {"lr": torch.tensor(0.1)}, "S-"),
}


def classes(module: Any) -> dict[str, type[Optimizer]]:
    return {
        name: member
        for name, member in vars(module).items()
        if inspect.isclass(member) and issubclass(member, Optimizer) and member is not Optimizer
    }


def letters(traits: Traits) -> str:
    found = (traits.separable, traits.steppable_in_parts, traits.elementwise)
    return "".join(letter if has else "-" for letter, has in zip("SPE", found, strict=True))


def rows() -> Iterator[Any]:
    for module, table in ((torch.optim, TORCH), (torch_optimizer, TORCH_OPTIMIZER)):
        for name, expected in table.items():
            build = lookahead if name == "Lookahead" else getattr(module, name, None)
            marks = needs_muon if name == "Muon" else ()
            yield pytest.param(build, {}, expected, id=f"{module.__name__}.{name}", marks=marks)
    for name, row in CONDITIONAL.items():
        yield pytest.param(*row, id=name)


def test_no_class_of_either_package_is_missing_from_the_table() -> None:
    assert set(TORCH) == {*classes(torch.optim), "Muon"}
    assert set(TORCH_OPTIMIZER) == set(classes(torch_optimizer))


@pytest.mark.parametrize(("build", "options", "expected"), list(rows()))
def test_traits_of_every_class(
    build: Callable[..., Optimizer], options: dict[str, Any], expected: str
) -> None:
    begin = time.perf_counter()
    traits = probe(build, options)
    print(f"\n{(time.perf_counter() - begin) * 1e3:.0f} ms", traits)  # noqa: T201 - logged, not asserted
    assert letters(traits).startswith(expected), traits
    reasons = (traits.coupling or traits.untried, traits.counting, traits.shape_use)
    if traits.separable:
        assert reasons[0] is None
        assert (reasons[1] is None, reasons[2] is None) == (traits.steppable_in_parts, traits.elementwise)
    else:
        assert reasons[0]


# ------------------------------------------------------------------ reasons


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (torch.optim.LBFGS, "needs a closure"),
        (SharpnessAware, "needs a closure"),
        (torch_optimizer.Adahessian, "second-order gradients"),
        (OnGpuOnly, "RuntimeError: expected CUDA tensors"),
        (NeverMoves, "no parameter moved"),
    ],
)
def test_a_class_that_cannot_be_tried_says_what_it_needs(build: Callable[..., Optimizer], words: str) -> None:
    traits = probe(build, {})
    assert words in (traits.untried or "")
    assert words in refusal(build, traits)
    assert "assume_separable=True" in refusal(build, traits)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (Langevin, "draws random numbers"),
        (RoundsStochastically, "draws random numbers"),
        (OwnNoise, "two equal runs"),
        (ClipsGlobally, "differed after step"),
        (torch_optimizer.SWATS, "differed"),
    ],
)
def test_a_refusal_says_what_differed_and_what_to_do(build: Callable[..., Optimizer], words: str) -> None:
    message = refusal(build, probe(build, {}))
    assert words in message
    assert build.__qualname__ in message
    assert "assume_separable=True" in message


# ------------------------------------------------------------------ options


class LeavesMemoryUnwritten(Small):
    """In bfloat16, its state differs between equal runs, and it may also clip all gradients together."""

    count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        half = [p for _, p in self.each() if p.dtype == torch.bfloat16]
        norm = sum((float(p.grad.float().norm()) for p in half if p.grad is not None), 1.0)
        for group, p in self.each():
            if p.dtype == torch.bfloat16:
                type(self).count += 1
                self.state[p]["unwritten"] = torch.tensor(self.count)
            p.add_(p.grad / norm if group["clips"] else p.grad, alpha=-group["lr"])


def test_state_that_is_never_written_excuses_no_difference_of_parameters() -> None:
    assert probe(LeavesMemoryUnwritten, {"clips": False}).separable
    assert "the parameter of shape" in (probe(LeavesMemoryUnwritten, {"clips": True}).coupling or "")


@pytest.mark.parametrize("switch", ["foreach", "capturable", "differentiable", "maximize"])
def test_switches_of_an_implementation_change_no_trait(switch: str) -> None:
    assert letters(probe(torch.optim.AdamW, {switch: True})) == ALL


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "Adagrad"])
def test_fused_kernels_are_tried_themselves(name: str) -> None:
    # Whether a cut shows depends on how a processor's kernel treats the end of a vector.
    traits = probe(getattr(torch.optim, name), {"fused": True})
    assert traits.steppable_in_parts
    assert traits.elementwise or "cut in pieces" in (traits.shape_use or "")


def test_a_switch_bound_by_partial_is_found() -> None:
    build = functools.partial(functools.partial(torch.optim.Adam, lr=0.1), capturable=True)
    assert letters(probe(build, {"lr": 1e-2})) == ALL


@pytest.mark.parametrize("rate", [0, 0.0, torch.tensor(0.0), torch.tensor(0.1)])
def test_a_rate_of_zero_hides_nothing(rate: Any) -> None:
    assert letters(probe(torch.optim.SGD, {"lr": rate})) == ALL
    assert letters(probe(ClipsGlobally, {"lr": rate})) == NONE


def test_options_given_by_groups_count() -> None:
    decays = [{"weight_decay": 0.0}, {"weight_decay": 1e-4, "params": [1], "lr": 0.2}]
    assert letters(probe(torch_optimizer.LARS, {"lr": 0.1}, decays[:1])) == ALL
    assert letters(probe(torch_optimizer.LARS, {"lr": 0.1}, decays)) == WHOLE


def test_forty_groups_of_different_rates_are_tried_as_one() -> None:
    calls = []

    def build(groups: Any, **options: Any) -> Optimizer:
        calls.append(len(groups))
        return torch.optim.SGD(groups, **options)

    assert probe(build, {}, [{"lr": 0.01 * (k + 1)} for k in range(40)]).elementwise
    assert max(calls) == 2


def test_a_users_tensors_are_left_as_they_were() -> None:
    rate = torch.tensor(0.1)
    probe(ChangesItsRate, {"lr": rate})
    assert rate == torch.tensor(0.1)


# ------------------------------------------------------------------ once, and for the right class


class Counted(Small):
    """Counts how often it was built."""

    built = 0

    def __init__(self, params: Any, **options: Any) -> None:
        type(self).built += 1
        super().__init__(params, **options)


def test_a_class_with_the_same_options_is_tried_once() -> None:
    probe(Counted, {"lr": 0.1, "betas": [0.9, 0.99]})
    built = Counted.built
    assert built > 0
    probe(Counted, {"lr": 0.1, "betas": [0.9, 0.99]})
    probe(functools.partial(Counted, lr=0.1), {"betas": [0.9, 0.99]})
    assert Counted.built == built
    probe(Counted, {"lr": 0.2, "betas": [0.9, 0.99]})
    assert Counted.built > built


def test_options_that_can_change_are_tried_again() -> None:
    class Switch:
        on = False

    class Switched(ClipsGlobally):
        def __init__(self, params: Any, switch: Switch) -> None:
            super().__init__(params, 1.0 if switch.on else 1e30)

    switch = Switch()
    assert probe(Switched, {"switch": switch}).separable
    switch.on = True
    assert not probe(Switched, {"switch": switch}).separable
    limit = [1e30]
    build = _by_list
    assert probe(build, {"limit": limit}).separable
    limit[0] = 1.0
    assert not probe(build, {"limit": limit}).separable


def _by_list(params: Any, limit: list[float]) -> Optimizer:
    return ClipsGlobally(params, limit[0])


def test_a_class_is_not_kept_alive() -> None:
    class Local(Small):
        pass

    class Option:
        pass

    option = Option()
    kept = weakref.ref(Local), weakref.ref(option)
    probe(Local, {})
    probe(Local, {"option": option})
    del Local, option
    gc.collect()
    assert [reference() for reference in kept] == [None, None]


# ------------------------------------------------------------------ without a trace


def _states() -> tuple[Any, ...]:
    name, words, *rest = np.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), (name, words.tobytes(), *rest)


@pytest.mark.parametrize("source", ["torch", "numpy", "python"])
def test_random_numbers_are_as_before(source: str) -> None:
    before = _states()
    probe(torch.optim.Adam, {"lr": 0.123, "eps": len(source) * 1e-9})
    probe(functools.partial(Langevin), {"source": source, "unused": object()})
    assert _states() == before


def test_a_seed_among_the_options_is_not_sown() -> None:
    before = _states()
    probe(torch_optimizer.Adahessian, {"seed": 5})
    assert _states() == before


def test_global_step_hooks_do_not_fire_and_stay() -> None:
    seen = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: seen.append("pre")),
        register_optimizer_step_post_hook(lambda *_: seen.append("post")),
    ]
    try:
        probe(torch.optim.Adam, {"lr": 0.0625})
        assert seen == []
        torch.optim.SGD([torch.zeros(1, requires_grad=True)]).step()
        assert seen == ["pre", "post"]
    finally:
        for handle in handles:
            handle.remove()
    torch.optim.SGD([torch.zeros(1, requires_grad=True)]).step()
    assert seen == ["pre", "post"]


@contextmanager
def _default_device(name: str) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(
    ("number", "surroundings"),
    list(
        enumerate(
            [
                torch.no_grad,
                torch.inference_mode,
                functools.partial(torch.device, "meta"),
                functools.partial(_default_device, "meta"),
                functools.partial(_default_dtype, torch.float64),
                functools.partial(_default_dtype, torch.bfloat16),
                functools.partial(torch.autocast, "cpu"),
            ]
        )
    ),
)
def test_surroundings_change_nothing_and_are_not_changed(
    number: int, surroundings: Callable[[], Any]
) -> None:
    def modes() -> tuple[object, ...]:
        return (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.empty(0).device,
            torch.get_default_dtype(),
            torch.get_num_threads(),
            list(warnings.filters),
        )

    with surroundings():
        before = modes()
        assert letters(probe(torch.optim.AdamW, {"lr": 1e-3 + number})) == ALL
        assert letters(probe(torch_optimizer.SWATS, {"weight_decay": 1e-3 + number * 1e-6})) == NONE
        assert modes() == before


def test_classes_are_tried_after_a_default_device_was_taken_back() -> None:
    with _default_device("meta"):
        pass
    assert letters(probe(torch.optim.AdamW, {"lr": 0.0117})) == ALL


def test_a_class_that_warns_is_not_heard() -> None:
    class Warns(Small):
        def step(self, closure: Any = None) -> None:
            warnings.warn("old", stacklevel=1)
            super().step()

    assert probe(Warns, {}).elementwise


# ------------------------------------------------------------------ the shape of state


def test_state_with_the_parameters_shape_is_known_by_dimensions() -> None:
    assert ShapedKeys(torch.optim.Adam, {"capturable": True}).of(2) == {"exp_avg", "exp_avg_sq"}
    assert ShapedKeys(torch.optim.SparseAdam, {}).of(2) == {"exp_avg", "exp_avg_sq"}
    assert ShapedKeys(torch.optim.Adafactor, {}).of(1) == {"variance"}
    assert ShapedKeys(torch.optim.Adafactor, {}).of(2) == frozenset()
    assert ShapedKeys(torch.optim.LBFGS, {}).of(1) == frozenset()
    assert ShapedKeys(torch.optim.SGD, {"lr": 0.0, "momentum": 0.9}).of(0) == frozenset()


@needs_muon
def test_state_of_a_class_for_matrices_has_their_shape_alone() -> None:
    assert ShapedKeys(torch.optim.Muon, {}).of(2) == {"momentum_buffer"}
    assert ShapedKeys(torch.optim.Muon, {}).of(1) == frozenset()
