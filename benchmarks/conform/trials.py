"""The optimizer classes of the table, with the options that each is tried with."""

import importlib
import sys
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

KINDS = {
    "element": "element by element",
    "tensor": "needs whole tensors",
    "all": "looks at all parameters",
    "state": "has state or modes of its own",
}


@dataclass(frozen=True)
class Trial:
    """One class.

    Args:
        name: package and class.
        kind: what its step needs, a key of `KINDS`.
        options: arguments of the constructor.
        of_group: entries that it wants in each group.
        feed: the parameters that it takes, see `Tower`.
        wraps: the class that it wraps, if it is a wrapper.
        closure: "first" if step() evaluates the model, "second" if it evaluates it again, otherwise "".
        variant: tells trials of one class apart.
        is_half: whether its step rounds to bfloat16 whatever the dtype of the parameters.
    """

    name: str
    kind: str = "element"
    options: dict[str, Any] = field(default_factory=dict)
    of_group: dict[str, Any] = field(default_factory=dict)
    feed: str = "mixed"
    wraps: str = ""
    closure: str = ""
    variant: str = ""
    is_half: bool = False

    @property
    def package(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def optimizer_class(self) -> Any:
        """The class, or for a wrapper the function that builds it from groups."""
        found = _class_of(self.name)
        if not self.wraps:
            return found
        inner = _class_of(self.wraps)

        def build(groups: Any, **options: Any) -> Optimizer:
            optimizer: Optimizer = found(inner(groups, **options))
            return optimizer

        build.__qualname__ = self.name
        return build

    def groups(self, model: nn.Module, *, two: bool) -> list[Any]:
        """Return what is optimized: parameters, or groups; ``two`` with other options in the second."""
        params = list(model.parameters())
        if not two:
            return [{"params": params, **self.of_group}] if self.of_group else params
        is_first = [param.dim() > 1 for param in params]
        if all(is_first):
            is_first = [number % 2 == 0 for number in range(len(params))]
        other = {"lr": self.options["lr"] / 2}
        if "weight_decay" in self.options:
            other["weight_decay"] = 0.0
        return [
            {"params": _where(params, is_first), **self.of_group},
            {"params": _where(params, [not each for each in is_first]), **self.of_group, **other},
        ]


def _where(params: Iterable[nn.Parameter], chosen: Iterable[bool]) -> list[nn.Parameter]:
    return [param for param, is_chosen in zip(params, chosen, strict=True) if is_chosen]


def _class_of(name: str) -> Any:
    package, _, own = name.rpartition(".")
    return getattr(module_named(package), own)


def module_named(name: str) -> Any:
    """Import a module; of timm its optimizers alone, as its models need a torchvision that fits torch."""
    if name == "timm.optim" and "timm" not in sys.modules:
        spec = find_spec("timm")
        if spec is None:
            raise ModuleNotFoundError("No module named 'timm'", name="timm")
        timm, models = types.ModuleType("timm"), types.ModuleType("timm.models")
        timm.__path__ = list(spec.submodule_search_locations or ())
        vars(models)["group_parameters"] = None
        sys.modules.update({"timm": timm, "timm.models": models})
    return importlib.import_module(name)


def is_installed(trial: Trial) -> bool:
    """Whether its package is there, and has the class."""
    try:
        _class_of(trial.name)
    except (ImportError, AttributeError):
        return False
    return True


def _trial(name: str, lr: float = 0.01, decay: float | None = 0.05, **more: Any) -> Trial:
    options = {"lr": lr} if decay is None else {"lr": lr, "weight_decay": decay}
    return Trial(name, options=options | more.pop("options", {}), **more)


def _list() -> Iterator[Trial]:
    for name in ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop"):
        yield _trial(f"torch.optim.{name}")
    yield _trial("torch.optim.Rprop", decay=None)
    yield _trial("torch.optim.SGD", 0.1, options={"momentum": 0.9})
    yield _trial("torch.optim.SparseAdam", decay=None, feed="sparse")
    yield _trial("torch.optim.SGD", 0.1, None, feed="added", variant="sparse embeddings, added up")
    yield _trial("torch.optim.Adafactor", kind="tensor")
    yield _trial("torch.optim.Muon", 0.02, kind="tensor", feed="matrices", is_half=True)
    yield _trial("torch.optim.LBFGS", 0.1, None, kind="all", closure="first", options={"max_iter": 3})
    for name in ("Yogi", "AdaBelief", "MADGRAD", "DiffGrad"):
        yield _trial(f"torch_optimizer.{name}")
    for name in ("Lamb", "AdamP", "NovoGrad", "AggMo"):
        yield _trial(f"torch_optimizer.{name}", kind="tensor" if name != "AggMo" else "element")
    yield _trial("torch_optimizer.LARS", 0.1, kind="tensor", options={"momentum": 0.9})
    yield _trial("torch_optimizer.Shampoo", 0.05, kind="tensor", options={"update_freq": 2})
    yield _trial("torch_optimizer.SWATS", kind="all")
    yield _trial("torch_optimizer.RAdam", kind="state")
    yield _trial("torch_optimizer.Lookahead", 0.1, None, kind="state", wraps="torch.optim.SGD")
    for name in ("Lion", "Adan", "ADOPT", "Tiger"):
        yield _trial(f"pytorch_optimizer.{name}")
    for name in ("SOAP", "AdaFactor", "CAME", "Adalite", "SM3", "StableAdamW", "Fromage", "Nero"):
        decay = None if name in ("SM3", "Fromage", "Nero") else 0.05
        more = {"precondition_frequency": 2} if name == "SOAP" else {}
        yield _trial(f"pytorch_optimizer.{name}", decay=decay, kind="tensor", options=more)
    yield _trial("pytorch_optimizer.Muon", 0.02, kind="tensor", feed="matrices", is_half=True,
                 of_group={"use_muon": True})  # fmt: skip
    yield _trial("pytorch_optimizer.Prodigy", 1.0, kind="all", options={"d0": 1e-3})
    yield _trial("pytorch_optimizer.DAdaptAdam", 1.0, kind="all", options={"d0": 1e-3})
    for name in ("Adai", "AvaGrad", "AdaGC"):
        yield _trial(f"pytorch_optimizer.{name}", kind="all")
    yield _trial("pytorch_optimizer.SAM", kind="all", closure="second",
                 options={"base_optimizer": torch.optim.SGD})  # fmt: skip
    yield _trial("pytorch_optimizer.ScheduleFreeAdamW", kind="state")
    for name in ("NAdamW", "LaProp"):
        yield _trial(f"timm.optim.{name}")
    for name in ("Lars", "Mars"):
        yield _trial(f"timm.optim.{name}", kind="tensor")
    yield _trial("timm.optim.AdafactorBigVision", kind="tensor", options={"min_dim_size_to_factor": 2})
    yield _trial("timm.optim.Lamb", kind="all")
    yield _trial("lion_pytorch.Lion")
    for name in ("AdamWScheduleFree", "RAdamScheduleFree", "SGDScheduleFree"):
        yield _trial(f"schedulefree.{name}", kind="state")
    yield _trial("heavyball.AdamW")
    yield _trial("heavyball.SOAP", kind="tensor")


TRIALS = {f"{trial.name} ({trial.variant})" if trial.variant else trial.name: trial for trial in _list()}
