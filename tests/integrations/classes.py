"""Every optimizer class of packages that the suite does not need, and what sharding it on two ranks gives.

``python tests/integrations/classes.py`` writes its part of docs/optimizers.md; test_classes.py compares it.
"""

import importlib
import inspect
import random
import re
import shutil
import sys
import tempfile
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import Parameter
from torch.optim import Optimizer

ROOT = Path(__file__).parents[2]
sys.path[:0] = [path for path in (str(ROOT / "tests"), str(ROOT)) if path not in sys.path]

from training import params_of, twin  # noqa: E402
from zero_optim import ZeroRedundancyOptimizer, checkpoint  # noqa: E402
from zero_optim.probe.probe import probe  # noqa: E402
from zero_optim.probe.subject import under_test  # noqa: E402

PACKAGES = {  # module: distribution
    "pytorch_optimizer": "pytorch_optimizer",
    "schedulefree": "schedulefree",
    "heavyball": "heavyball",
    "torchao.optim": "torchao",
    "bitsandbytes.optim": "bitsandbytes",
    "lion_pytorch": "lion-pytorch",
    "timm.optim": "timm",
}
PAGE = ROOT / "docs" / "optimizers.md"
HEADING = "## Other packages"

_BNB = {"lr": 0.01, "momentum": 0.9}
_MUON = {"use_muon": True}
# Arguments without which a class does nothing, or raises.
OPTIONS: dict[str, dict[str, Any]] = {
    **{
        f"bitsandbytes.optim.{kind}{bits}": _BNB for kind in ("LARS", "SGD") for bits in ("", "32bit", "8bit")
    },
    "bitsandbytes.optim.PytorchLARS": _BNB,
    "heavyball.PSGDBase": {"defaults": {}},
    "heavyball.SOAPBase": {"defaults": {}},
    "pytorch_optimizer.AdaShift": {"keep_num": 4},
    "pytorch_optimizer.BSAM": {"num_data": 100},
    "pytorch_optimizer.Ranger21": {"num_iterations": 20},
    "timm.optim.SGDP": {"lr": 0.1, "momentum": 0.9},
}
# What a class wants in each group.
_LOW_RANK = {"rank": 4, "update_proj_gap": 3, "scale": 1.0, "projection_type": "std"}
GROUPS: dict[str, dict[str, Any]] = {
    **{f"pytorch_optimizer.{name}": _LOW_RANK for name in ("Alice", "Conda", "Fira", "GaLore")},
    **{
        f"pytorch_optimizer.{name}": _MUON
        for name in ("AdaGO", "AdaMuon", "DistributedMuon", "Muon", "MuonClip", "NorMuon")
    },
}
# Wrappers of an optimizer, and classes that take another class.
WRAPPERS = (
    *(
        f"pytorch_optimizer.{name}"
        for name in ("Lookahead", "Magma", "OrthoGrad", "PCGrad", "SafeFP16Optimizer")
    ),
    "pytorch_optimizer.ScheduleFreeWrapper",
    "pytorch_optimizer.TRAC",
    "timm.optim.Lookahead",
)
SAMS = ("pytorch_optimizer.FriendlySAM", "pytorch_optimizer.LookSAM", "pytorch_optimizer.SAM")

FEEDS = {
    "any shape": ((6, 5), (7,), (4, 3, 3, 3), (64, 80), (12, 2), (1,), (3, 8), (128, 34)),
    "matrices": ((6, 5), (8, 8), (2, 9), (64, 80), (12, 4)),
}
NUM_STEPS = 10

# They step matrices of one shape as a batch, which has the bits of each matrix on some processors alone.
BATCHED = {
    "heavyball": (
        *("HeavyKLSOAP", "HeavySOAP", "HeavySOAPAdEMAMix", "HeavySOAPNAdam", "HeavySOLP"),
        *("KLSOAP", "SOAP", "SOAPAdEMAMix", "SOAPNAdam", "SOLP"),
    )
}
JOINS = "its steps join parameters"

# Parts of messages, and what the page says of them.
REASONS = (
    ("has a state_dict() of its own", "its own `state_dict()` cannot be saved in parts"),
    ("aten.clone", "its tensors cannot be copied"),
    ("which cannot be sent", "it holds objects"),
    ("ranks disagree about what to save", "its groups' entries differ by rank"),
    ("draws random numbers", "draws random numbers"),
    ("its step communicates", "communicates in its step"),
    ("equal runs of it give different", "two equal runs differ"),
    ("needs a closure", "needs a closure"),
    ("requires closure", "needs a closure"),
    ("needs second-order gradients", "needs second-order gradients"),
    ("parameter size is 0", "raises on a rank without parameters"),
    ("the group's entry", JOINS),
    (" differed after step", JOINS),
    ("named_parameters", "takes a model"),
    ("no attribute 'parameters'", "takes a model"),
    ("missing", "takes more than parameters"),
    ("could not be tried", "raises on small tensors"),
)


class Result(NamedTuple):
    """What sharding a class gives: equal, refused or wrong; why, or what of its state cannot be saved."""

    answer: str
    reason: str = ""
    is_half_refused: bool = False


# ---------------------------------------------------------------------- the classes


def module_named(name: str) -> types.ModuleType:
    """Import a module; of timm its optimizers alone, as its models need a torchvision that fits torch."""
    if name == "timm.optim" and "timm" not in sys.modules:
        timm, models = types.ModuleType("timm"), types.ModuleType("timm.models")
        timm.__path__ = list(find_spec("timm").submodule_search_locations)
        models.group_parameters = None
        sys.modules.update({"timm": timm, "timm.models": models})
    module = importlib.import_module(name)
    if name == "heavyball":  # its functions as they are: compiling them eagerly takes a third of the time
        module.utils.compile_mode = module.utils.compile_mode_recommended_to_none = None
    return module


def classes_of(package: str) -> Iterator[tuple[str, Callable[..., Optimizer]]]:
    """The optimizer classes of a package, by name."""
    for name, value in sorted(vars(module_named(package)).items()):
        if (
            inspect.isclass(value)
            and issubclass(value, Optimizer)
            and value is not Optimizer
            and name[0] != "_"
        ):
            yield name, value


def builder_of(name: str, optimizer_class: Callable[..., Optimizer]) -> Callable[..., Optimizer]:
    """What builds an optimizer from groups."""
    if name in WRAPPERS:

        def build(groups: Any) -> Optimizer:
            return optimizer_class(torch.optim.AdamW(groups, lr=0.01))

    elif name in SAMS:

        def build(groups: Any) -> Optimizer:
            return optimizer_class(groups, base_optimizer=torch.optim.SGD, lr=0.01)

    else:
        return optimizer_class
    build.__qualname__ = name
    return build


# ---------------------------------------------------------------------- one class


class Trainee(NamedTuple):
    """How a class is built and fed."""

    build: Callable[..., Optimizer]
    options: dict[str, Any]
    of_group: dict[str, Any]
    feed: str
    gaps: bool

    def params(self) -> list[Parameter]:
        generator = torch.Generator().manual_seed(0)
        return [Parameter(torch.randn(shape, generator=generator)) for shape in FEEDS[self.feed]]

    def groups(self, params: Sequence[Parameter]) -> Any:
        return [{"params": params, **self.of_group}] if self.of_group else params

    def plain(self, params: Sequence[Parameter]) -> Optimizer:
        return in_training(self.build(self.groups(params), **self.options))

    def sharded(self, params: Sequence[Parameter], **options: Any) -> ZeroRedundancyOptimizer:
        made = ZeroRedundancyOptimizer(self.groups(params), self.build, **options, **self.options)
        return in_training(made)

    def step(self, optimizer: Optimizer, number: int, max_norm: float | None = None) -> None:
        """Give the gradients of a step, equal on every rank, perhaps clipped, and take it."""
        generator = torch.Generator().manual_seed(100 + number)
        for index, param in enumerate(params_of(optimizer)):
            grad = torch.randn(param.shape, generator=generator)
            has_none = self.gaps and number > 2 and (index + number) % 4 == 0
            param.grad = None if has_none or not param.requires_grad else grad
        if max_norm is not None:
            clip = getattr(optimizer, "clip_grad_norm_", None)
            clip(max_norm) if clip else torch.nn.utils.clip_grad_norm_(params_of(optimizer), max_norm)
        optimizer.step()


def in_training(optimizer: Any) -> Any:
    """Classes without a schedule want to be told."""
    if callable(getattr(optimizer, "train", None)):
        optimizer.train()
    return optimizer


def check_class(name: str, optimizer_class: Callable[..., Optimizer], folder: Path) -> Result:
    """Train, save and resume one class beside its unsharded run."""
    build = builder_of(name, optimizer_class)
    for feed, gaps in (("any shape", True), ("any shape", False), ("matrices", False)):
        trainee = Trainee(build, OPTIONS.get(name, {}), GROUPS.get(name, {}), feed, gaps)
        try:
            params = trainee.params()
            plain = trainee.plain(params)
            values = []
            for number in range(NUM_STEPS):
                trainee.step(plain, number)
                values.append([param.detach().clone() for param in params])
        except Exception as error:  # noqa: BLE001
            plain_error = f"{type(error).__name__}: {error}"
        else:
            break
    else:
        values = None
    mine = trainee.params()
    try:
        sharded = trainee.sharded(mine)
    except Exception as error:  # noqa: BLE001
        if "allow_unsaved=True" not in str(error):
            return Result("refused", f"{type(error).__name__}: {error}")
        sharded = trainee.sharded(mine, allow_unsaved=True)
    if values is None:
        return Result("wrong", f"built, though the plain class raises {plain_error}")
    for number, expected in enumerate(values):
        trainee.step(sharded, number)
        if not all(map(torch.equal, mine, expected)):
            return Result("wrong", f"other bits after step {number}")
    if all(map(torch.equal, trainee.params(), mine)):
        return Result("wrong", "no parameter moved")
    try:
        in_half = probe(under_test(build, trainee.options, [trainee.of_group])).in_half
        return check_saved(trainee, plain, sharded, folder)._replace(is_half_refused=in_half is not None)
    except Exception as error:  # noqa: BLE001
        return Result("wrong", f"saved, but not loaded: {error}")


def check_saved(trainee: Trainee, plain: Optimizer, sharded: ZeroRedundancyOptimizer, folder: Path) -> Result:
    """The state goes to the plain class, comes from it, and to one rank by a checkpoint, with equal bits."""
    try:
        saved = plain.state_dict()
    except Exception as error:  # noqa: BLE001
        return Result("equal", f"its own state_dict() raises {type(error).__name__}")
    try:
        sharded.consolidate_state_dict(to=None)
        checkpoint.save(folder, optimizer=sharded)
    except Exception as error:  # noqa: BLE001
        return Result("equal", f"{type(error).__name__}: {error}")
    runs = {"a plain one": trainee.plain(twin(params_of(plain)))}
    runs["a plain one"].load_state_dict(sharded.state_dict())
    runs["two ranks"] = trainee.sharded(twin(params_of(plain)))
    runs["two ranks"].load_state_dict(saved)
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    runs["one rank"] = trainee.sharded(twin(params_of(plain)), process_group=alone)
    checkpoint.load(folder, optimizer=runs["one rank"])
    for number in range(NUM_STEPS, NUM_STEPS + 4):
        for run in (plain, sharded, *runs.values()):
            trainee.step(run, number)
        for what, run in {"it": sharded, **runs}.items():
            if not all(map(torch.equal, params_of(run), params_of(plain))):
                return Result("wrong", f"{what} gave other bits after it was saved, in step {number}")
    return Result("equal")


# ---------------------------------------------------------------------- all of a package, and the page


def sweep(package: str) -> dict[str, Result]:
    """Check every class of a package, on each rank of a call."""
    warnings.simplefilter("ignore")
    torch.compiler.set_stance("force_eager")
    results = {}
    where = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(where)
    for name, optimizer_class in classes_of(package):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        folder = Path(where[0]) / name
        results[name] = check_class(f"{package}.{name}", optimizer_class, folder)
        answers = [None] * dist.get_world_size()
        dist.all_gather_object(answers, results[name].answer)
        if len(set(answers)) > 1:
            results[name] = Result("wrong", f"ranks say {answers}")
    if dist.get_rank() == 0:
        shutil.rmtree(where[0])
    return results


def short(reason: str) -> str:
    """What the page says of a message."""
    words = next((words for part, words in REASONS if part in reason), None)
    if words is None:
        words = re.sub(r"^\w+: ", "", reason.splitlines()[0])
    return words.rstrip(".").replace("|", "/")


def page_of(package: str, results: dict[str, Result]) -> str:
    """Write what the page says of a package."""
    by_reason: dict[tuple[str, str], list[str]] = {}
    batched = []
    for name, (answer, reason, _) in results.items():
        why = short(reason) if reason else ""
        if name in BATCHED.get(package, ()) and (answer, why) in (("equal", ""), ("refused", JOINS)):
            batched.append(name)
        else:
            by_reason.setdefault((answer, why), []).append(name)
    counts = dict.fromkeys(("equal", "refused", "wrong"), 0)
    for (answer, _), names in by_reason.items():
        counts[answer] += len(names)
    count = f"{counts['equal']} equal, {counts['refused']} refused"
    count += f", {len(batched)} by processor" if batched else ""
    count += f", {counts['wrong']} WRONG" if counts["wrong"] else ""
    lines = [
        f"### {package}",
        "",
        f"{PACKAGES[package]} {version(PACKAGES[package])}, classes: {len(results)}, {count}.",
        "",
    ]
    for (answer, reason), names in sorted(by_reason.items(), key=lambda item: (item[0][0], -len(item[1]))):
        about = {"equal": "Equal", "refused": "Refused", "wrong": "WRONG"}[answer]
        about += f" with `allow_unsaved=True`, else refused: {reason}" if answer == "equal" and reason else ""
        about += f", {reason}" if answer != "equal" else ""
        lines.append(f"- {about}: {', '.join(names)}.")
    if batched:
        lines.append(f"- Equal, or refused as {JOINS}, by processor: {', '.join(batched)}.")
    half = [name for name, result in results.items() if result.is_half_refused and name not in batched]
    if half:
        lines.append(f"- Refused for parameters in half precision without `master_dtype`: {', '.join(half)}.")
    return "\n".join(lines) + "\n"


def documented(package: str) -> str:
    """Read what the page says of a package."""
    found = re.search(rf"^### {re.escape(package)}\n.*?(?=^##|\Z)", PAGE.read_text(), re.M | re.S)
    return found[0].rstrip() + "\n" if found else ""


HEAD = f"""{HEADING}

Made by `python tests/integrations/classes.py`, which trains every class on two ranks with its defaults, and
saves and resumes it: in the plain class, from the plain class, and by a checkpoint on one rank.
`make integrations` compares it. "Equal": all parameters, bit for bit. "Refused": when the optimizer is built,
with this reason. `dion` is in no package index. Classes that wrap an optimizer were given `AdamW`.
`heavyball` keeps pickled bytes in its state, which its own `load_state_dict` runs: load no file of strangers.
Its classes named "by processor" step matrices of one shape as a batch, which has the bits of each matrix on
some processors (seen on an Intel Xeon) and not on others (AMD EPYC). `SOAP` and `SOLP` are equal on both with
`multi_tensor=False`.

"""


def main() -> None:
    """Write the section of the page."""
    from pool import Pool

    with Pool() as pool:
        parts = [page_of(name, pool.run(2, sweep, name, timeout=500)[0]) for name in PACKAGES]
    before = PAGE.read_text().partition(HEADING)[0]
    PAGE.write_text(before.rstrip() + "\n\n" + HEAD + "\n".join(parts))


if __name__ == "__main__":
    main()
