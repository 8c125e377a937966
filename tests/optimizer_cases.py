"""Every optimizer class of torch.optim and torch_optimizer: options, inputs, and the expected answer.

This table is the source of tests/test_optimizers.py and docs/optimizers.md. A test fails if either package
has a class that is not in the table.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeAlias

import torch
import torch_optimizer
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer, lr_scheduler

from training import HAS_MUON, MATRICES, MIXED, make_params

Options: TypeAlias = dict[str, Any]
Answer: TypeAlias = Literal["bitwise", "refused"]
Feed: TypeAlias = Literal["any shape", "no kernels", "at least 1-d", "matrices", "sparse rows"]

SHAPES: dict[Feed, tuple[tuple[int, ...], ...]] = {
    "any shape": MIXED,
    "no kernels": tuple(shape for shape in MIXED if len(shape) <= 2),
    "at least 1-d": tuple(shape for shape in MIXED if shape),
    "matrices": MATRICES,
    "sparse rows": ((10, 4), (6, 3), (7, 2), (9, 5)),
}


@dataclass(frozen=True)
class Case:
    """One class.

    Args:
        optimizer_class: the class, or for a wrapper the function that builds it from groups.
        options: sets of keyword arguments; each is tried.
        feed: the parameters and gradients that it takes.
        answer: the result of sharding it.
        because: if it is refused, a part of the message; otherwise what equality depends on.
        saves: whether the plain optimizer can return a state dict with this PyTorch.
        rates: whether groups, and steps that leave parameters out, may have their own rates.
    """

    optimizer_class: Callable[..., Optimizer]
    options: tuple[Options, ...] = ({},)
    feed: Feed = "any shape"
    answer: Answer = "bitwise"
    because: str = ""
    saves: bool = True
    rates: bool = True

    @property
    def sharding(self) -> Options:
        """What a sharded optimizer needs beside the options of the class."""
        return {} if self.saves else {"allow_unsaved": True}

    def params(self) -> list[Parameter]:
        """Parameters of the kind that the class takes."""
        return make_params(SHAPES[self.feed])

    def give_gradients(self, params: Sequence[Tensor], step: int, *, gaps: bool = True) -> None:
        """Set the gradients of a step: the same on every rank; with gaps, None for some parameters."""
        generator = torch.Generator().manual_seed(1000 + step)
        for index, p in enumerate(params):
            grad = torch.randn(p.shape, generator=generator)
            if self.feed == "sparse rows":
                grad = _some_rows(grad, step)
            p.grad = None if gaps and is_gap(index, step) else grad


def is_gap(index: int, step: int) -> bool:
    """Whether a parameter has no gradient: one at first, each now and then after three steps."""
    return (index == 1 and step < 2) or (step >= 3 and (index + step) % 4 == 0)


def _some_rows(dense: Tensor, step: int) -> Tensor:
    rows = torch.tensor([[1, 3 + step % 2]])
    return torch.sparse_coo_tensor(rows, dense[rows[0]], dense.shape, check_invariants=True)


def build_lookahead(groups: Any, *, k: int = 5, alpha: float = 0.5, **options: Any) -> Optimizer:
    """A wrapper is given as a function that builds it, around what it wraps, from groups."""
    return torch_optimizer.Lookahead(torch.optim.SGD(groups, **options), k=k, alpha=alpha)


_MOMENTUM: Options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
_NESTEROV: Options = {**_MOMENTUM, "nesterov": True}
_DECAY: Options = {"lr": 0.01, "weight_decay": 0.05}

CASES: dict[str, Case] = {
    "torch.optim.ASGD": Case(torch.optim.ASGD, ({}, {**_DECAY, "t0": 3})),
    "torch.optim.Adadelta": Case(torch.optim.Adadelta, ({}, _DECAY)),
    "torch.optim.Adafactor": Case(torch.optim.Adafactor, ({}, _DECAY)),
    "torch.optim.Adagrad": Case(
        torch.optim.Adagrad, ({}, {**_DECAY, "lr_decay": 0.1, "initial_accumulator_value": 0.5})
    ),
    "torch.optim.Adam": Case(torch.optim.Adam, ({}, {**_DECAY, "amsgrad": True})),
    "torch.optim.AdamW": Case(torch.optim.AdamW, ({}, {**_DECAY, "amsgrad": True})),
    "torch.optim.Adamax": Case(torch.optim.Adamax, ({}, _DECAY)),
    "torch.optim.LBFGS": Case(torch.optim.LBFGS, answer="refused", because="needs a closure"),
    "torch.optim.Muon": Case(
        getattr(torch.optim, "Muon", Optimizer),
        ({}, {"lr": 0.05, "adjust_lr_fn": "match_rms_adamw"}),
        "matrices",
    ),
    "torch.optim.NAdam": Case(torch.optim.NAdam, ({}, {**_DECAY, "decoupled_weight_decay": True})),
    "torch.optim.RAdam": Case(torch.optim.RAdam, ({}, {**_DECAY, "decoupled_weight_decay": True})),
    "torch.optim.RMSprop": Case(torch.optim.RMSprop, ({}, {**_DECAY, "momentum": 0.9, "centered": True})),
    "torch.optim.Rprop": Case(torch.optim.Rprop),
    "torch.optim.SGD": Case(torch.optim.SGD, ({}, _MOMENTUM, _NESTEROV)),
    "torch.optim.SparseAdam": Case(torch.optim.SparseAdam, ({}, {"lr": 0.1}), "sparse rows"),
    "torch_optimizer.A2GradExp": Case(torch_optimizer.A2GradExp),
    "torch_optimizer.A2GradInc": Case(torch_optimizer.A2GradInc),
    "torch_optimizer.A2GradUni": Case(torch_optimizer.A2GradUni),
    "torch_optimizer.AccSGD": Case(torch_optimizer.AccSGD, ({}, _DECAY)),
    "torch_optimizer.AdaBelief": Case(
        torch_optimizer.AdaBelief, ({}, {**_DECAY, "amsgrad": True, "rectify": True, "weight_decouple": True})
    ),
    "torch_optimizer.AdaBound": Case(torch_optimizer.AdaBound, ({}, {**_DECAY, "amsbound": True})),
    "torch_optimizer.AdaMod": Case(torch_optimizer.AdaMod, ({}, _DECAY)),
    "torch_optimizer.Adafactor": Case(
        torch_optimizer.Adafactor, ({}, {"lr": 0.01, "relative_step": False, "beta1": 0.9}), "no kernels"
    ),
    "torch_optimizer.Adahessian": Case(
        torch_optimizer.Adahessian, answer="refused", because="needs second-order gradients"
    ),
    "torch_optimizer.AdamP": Case(torch_optimizer.AdamP, ({}, {**_DECAY, "nesterov": True})),
    "torch_optimizer.AggMo": Case(torch_optimizer.AggMo, ({}, _DECAY)),
    "torch_optimizer.Apollo": Case(torch_optimizer.Apollo, ({}, {**_DECAY, "warmup": 4})),
    "torch_optimizer.DiffGrad": Case(torch_optimizer.DiffGrad, ({}, _DECAY)),
    "torch_optimizer.LARS": Case(torch_optimizer.LARS, ({}, _NESTEROV)),
    "torch_optimizer.Lamb": Case(torch_optimizer.Lamb, ({}, {**_DECAY, "debias": True})),
    "torch_optimizer.Lookahead": Case(
        build_lookahead,
        ({"lr": 0.1}, {**_MOMENTUM, "k": 3}),
        because="with allow_unsaved=True: its own state_dict() fails with this PyTorch",
        saves=False,
    ),
    "torch_optimizer.MADGRAD": Case(torch_optimizer.MADGRAD, ({}, {**_DECAY, "momentum": 0.0})),
    "torch_optimizer.NovoGrad": Case(
        torch_optimizer.NovoGrad, ({}, {**_DECAY, "grad_averaging": True, "amsgrad": True})
    ),
    "torch_optimizer.PID": Case(torch_optimizer.PID, ({}, _MOMENTUM)),
    "torch_optimizer.QHAdam": Case(torch_optimizer.QHAdam, ({}, {**_DECAY, "nus": (0.7, 0.9)})),
    "torch_optimizer.QHM": Case(
        torch_optimizer.QHM, ({"momentum": 0.9}, {**_MOMENTUM, "weight_decay_type": "direct"})
    ),
    "torch_optimizer.RAdam": Case(
        torch_optimizer.RAdam,
        ({}, _DECAY),
        because="with one constant rate: its groups share a cache of step sizes",
        rates=False,
    ),
    "torch_optimizer.Ranger": Case(torch_optimizer.Ranger, ({}, {**_DECAY, "k": 3})),
    "torch_optimizer.RangerQH": Case(
        torch_optimizer.RangerQH, ({}, {**_DECAY, "k": 3, "decouple_weight_decay": True})
    ),
    "torch_optimizer.RangerVA": Case(torch_optimizer.RangerVA, ({}, {**_DECAY, "k": 3})),
    "torch_optimizer.SGDP": Case(torch_optimizer.SGDP, ({}, _NESTEROV)),
    "torch_optimizer.SGDW": Case(torch_optimizer.SGDW, ({}, _NESTEROV)),
    "torch_optimizer.SWATS": Case(torch_optimizer.SWATS, answer="refused", because="the group's entry 'lr'"),
    "torch_optimizer.Shampoo": Case(
        torch_optimizer.Shampoo, ({}, {"lr": 0.01, "momentum": 0.9, "update_freq": 2}), "at least 1-d"
    ),
    "torch_optimizer.Yogi": Case(torch_optimizer.Yogi, ({}, _DECAY)),
}

TABLE = Path(__file__).parents[1] / "docs" / "optimizers.md"
MISSING = set() if HAS_MUON else {"torch.optim.Muon"}  # classes that this PyTorch does not have
BITWISE = [name for name, case in CASES.items() if case.answer == "bitwise" and name not in MISSING]
REFUSED = [name for name, case in CASES.items() if case.answer == "refused"]
SWITCHES = ("foreach", "fused", "capturable", "maximize", "differentiable")


def documented() -> list[list[str]]:
    """Read docs/optimizers.md, for each set of options: name, options, failed trials, answer."""
    every = TABLE.read_text().partition("## torch.optim and torch_optimizer")[2].partition("## ")[0]
    lines = [line for line in every.splitlines() if "torch" in line]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    answers = {name: [failed, answer] for failed, answer, names in rows for name in names.split("; ")}
    return [
        [name, options, *(answers.get(name) or answers.get(f"{name}({options})", ["", "not in the table"]))]
        for name, case in CASES.items()
        for options in map(write_options, case.options)
    ]


def classes_of(module: ModuleType) -> Iterator[str]:
    """Name the optimizer classes that a package has, the abstract base left out."""
    for name, value in vars(module).items():
        if inspect.isclass(value) and issubclass(value, Optimizer) and value is not Optimizer:
            yield f"{module.__name__}.{name}"


def switches_of(case: Case) -> list[str]:
    """Name the implementation switches that a class's constructor has."""
    return [name for name in SWITCHES if name in inspect.signature(case.optimizer_class).parameters]


def write_options(options: Options) -> str:
    """Write options as they stand in the table of the documentation."""
    return ", ".join(f"{key}={value!r}" for key, value in options.items()) or "defaults"


def answer_of(case: Case) -> str:
    """Write what sharding a class gives, once its test has passed."""
    if case.answer == "refused":
        return "refused because"
    return f"yes; {case.because}" if case.because else "yes"


def _tenth_less(step: int) -> float:
    return 0.9**step


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "LambdaLR": partial(lr_scheduler.LambdaLR, lr_lambda=_tenth_less),
    "ReduceLROnPlateau": partial(lr_scheduler.ReduceLROnPlateau, factor=0.5, patience=1),
    "OneCycleLR": partial(lr_scheduler.OneCycleLR, max_lr=[0.1, 0.2], total_steps=12),
}
