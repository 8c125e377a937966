"""Why cells are silently wrong. Each cause has a script that shows it without the benchmark."""

from collections.abc import Callable
from dataclasses import dataclass

from conform.trials import TRIALS, Trial

DDP_BASED = ("ddp", "zero", "oss")
OWNING = ("zero", "oss", "sharded-ddp")
DEEPSPEED = ("deepspeed1", "deepspeed2")


@dataclass(frozen=True)
class Cause:
    """One cause.

    Args:
        title: what goes wrong.
        text: why, and what the system's documentation says.
        script: in benchmarks/reproducers.
        systems: where.
        loops: in which, all if empty.
        holds: for which classes.
        documented: whether the documentation of the system says so.
    """

    title: str
    text: str
    script: str
    systems: tuple[str, ...]
    loops: tuple[str, ...] = ()
    holds: Callable[[Trial], bool] = lambda _: True
    documented: bool = False


def _joins_parameters(trial: Trial) -> bool:
    return trial.kind == "all"


CAUSES = (
    Cause(
        "Added up sparse embeddings",
        "DDP divides sparse gradients in place. Embeddings whose outputs are added up share one tensor of"
        " values, which is divided once for each of them.",
        "ddp_sparse_embeddings.py",
        DDP_BASED,
        holds=lambda trial: trial.feed == "added",
    ),
    Cause(
        "Unfrozen after wrapping",
        "DDP does not reduce the gradient of a parameter that was frozen when it was wrapped. Replicas "
        "drift apart.",
        "ddp_unfrozen_later.py",
        DDP_BASED,
        ("unfreeze",),
        documented=True,
    ),
    Cause(
        "Unfrozen after `initialize()`",
        "DeepSpeed leaves parameters out that were frozen at `initialize()`. They never train.",
        "deepspeed_unfrozen_later.py",
        DEEPSPEED,
        ("unfreeze",),
    ),
    Cause(
        "Frozen after `initialize()`",
        "When a parameter in DeepSpeed's flat tensor is frozen, its gradient is zero, not None. "
        "Momentum and weight decay still move it.",
        "deepspeed_frozen_later.py",
        DEEPSPEED,
        ("freeze",),
    ),
    Cause(
        "Flat pieces",
        "DeepSpeed steps one flat piece of all parameters on each rank. Classes that need whole tensors,"
        " or all of them, compute something else. It refuses all but some classes unless "
        "`zero_allow_untested_optimizer` is set.",
        "deepspeed_flat_pieces.py",
        DEEPSPEED,
        holds=lambda trial: trial.kind != "element",
        documented=True,
    ),
    Cause(
        "Uneven inputs",
        "Under `Join` a rank without inputs steps the parameters that it owns with no gradient or an old "
        "one. Classes that need a closure or a gradient raise on that rank, and the other rank hangs.",
        "zero_uneven_inputs.py",
        ("zero",),
        ("uneven",),
    ),
    Cause(
        "State after uneven inputs",
        "At the end of `Join` DDP broadcasts parameters from a rank that made the last step, but not the "
        "optimizer's state. Schedule-free classes compute parameters from their state in `eval()`.",
        "ddp_uneven_state.py",
        ("ddp",),
        ("uneven",),
        holds=lambda trial: "ScheduleFree" in trial.name,
    ),
    Cause(
        "Steps that join parameters",
        "Each rank builds the class for the parameters that it owns. A norm or distance over all "
        "parameters is computed over one rank's part.",
        "zero_lbfgs.py",
        OWNING,
        holds=_joins_parameters,
    ),
    Cause(
        "Frozen later",
        "ShardedDDP zeroes its buckets of small gradients, also with `set_to_none=True`. The gradient of "
        "a parameter that is frozen later is zero, not None. Momentum and weight decay still move it.",
        "sharded_ddp_frozen_later.py",
        ("sharded-ddp",),
        ("freeze",),
    ),
    Cause(
        "Gradients that became None",
        "ShardedDDP does not reduce a small gradient that is no longer the view into its bucket: after a "
        "class dropped gradients in its step, or after `optimizer.zero_grad()` since PyTorch 2.0. The table "
        "uses `model.zero_grad()`, as FairScale's tutorial does.",
        "sharded_ddp_none_gradients.py",
        ("sharded-ddp",),
        holds=lambda trial: trial.package == "heavyball",
    ),
)


def cause_of(name: str, loop: str, system: str) -> int | None:
    """Return the number of the cause of a wrong cell, from 1; None if it has none yet."""
    for number, cause in enumerate(CAUSES, 1):
        in_loop = not cause.loops or loop in cause.loops
        if system in cause.systems and in_loop and cause.holds(TRIALS[name]):
            return number
    return None
