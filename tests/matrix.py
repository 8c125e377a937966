"""The matrix of failures: each kind of failure in each phase of a run, and what all other ranks say of it.

`CELLS` is the table. `run_cells` runs some of it in processes of their own, and `complaint` judges one.
docs/make_failure_table.py measures how long each takes. No test does, as a busy machine takes any time: it
asserts that a message tells of a passed timeout where one has to pass, and of none where none has.
"""

import re
import signal
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from stalling import let_rank_go_on, outcomes
from troubled import PHASES, PLANNED, TIMEOUT, Troubled, make_model, play, seconds_since_trouble
from zero_optim import ZeroRedundancyOptimizer, checkpoint
from zero_optim.errors import ZeroOptimError

LIMIT = 120.0  # seconds that only a hang reaches
SIDE_BY_SIDE = 8  # cells, most of whose time is a wait

# Where docs/failures.md has the table.
BEGIN, END = "<!-- the matrix begins -->\n", "<!-- the matrix ends -->\n"

FAILURES = {
    "killed": "SIGKILL",
    "killed first": "SIGKILL of rank 0",
    "stopped": "SIGSTOP",
    "stopped first": "SIGSTOP of rank 0",
    "error": "exception",
    "skipped": "skipped call",
    "extra": "extra call",
    "slow": "slow rank",
    "shape": "wrong shape",
}


@dataclass(frozen=True)
class Outcome:
    """What survivors say."""

    meaning: str
    pattern: str
    passes_timeout: bool | None


OUTCOMES = {
    "ended": Outcome(
        "`StalledError`: the rank has ended", r"StalledError: .*rank {bad} has (ended|dropped)", False
    ),
    "its error": Outcome(
        "the error that the rank raised itself, with its number",
        rf"\w+: .*rank {{bad}}.*({PLANNED}|got other memory)"
        r"|StalledError: .*rank {bad} has (ended|dropped)",
        False,
    ),
    "raised, ended": Outcome(
        "the rank raises the reason, in a mesh perhaps its replica too, and ends; then as *ended*",
        r"\w+: .*rank {bad}\b",
        False,
    ),
    "silent": Outcome(
        "`StalledError`: the rank does not answer", r"StalledError: .*rank {bad} does not answer", True
    ),
    "late": Outcome(
        "`StalledError`: the rank has not come to a call, or waits for nothing in it",
        r"StalledError: .*rank {bad} (has not (called|begun)|is in) ",
        True,
    ),
    "apart": Outcome(
        "`StalledError`: who waits for what, and which rank made a call more or less often than others; "
        "or `RankMismatchError`: how many calls each rank made",
        r"StalledError: stalled for .*times of .* on rank {bad}\b|(?!StalledError)\w+: .*rank {bad}\b",
        None,
    ),
    "shape": Outcome(
        "`RankMismatchError` or `StateMismatchError`, which names the tensor and its shapes",
        r"(Rank|State)MismatchError: .*(0\.weight|parameter 0)",
        False,
    ),
}


@dataclass(frozen=True)
class Cell:
    """One failure in one phase."""

    phase: str
    failure: str
    outcome: str
    size: int = 2
    reason: str = ""

    @property
    def bad(self) -> int:
        """The rank that has the trouble; as rank 0 it has the store of the default group, too."""
        return 0 if self.failure.endswith(" first") else self.size - 1

    @property
    def kind(self) -> str:
        """What befalls it."""
        return self.failure.removesuffix(" first")

    def __str__(self) -> str:
        return f"{self.phase} x {self.failure}"


# What gloo raises where the rank that has joined waits in PyTorch's own code.
_IN_JOIN = r"RuntimeError: .*(Connection closed by peer|caused pair closure|Connection reset)"

_USUAL = {
    "killed": "ended",
    "killed first": "ended",
    "stopped": "silent",
    "stopped first": "silent",
    "error": "its error",
    "skipped": "apart",
    "extra": "apart",
    "slow": "late",
    "shape": "shape",
}
_OTHER = {
    **{(phase, "error"): "raised, ended" for phase in PHASES if PHASES[phase].raises_alone},
    ("overlap", "extra"): "raised, ended",
    **{(phase, "shape"): "raised, ended" for phase in PHASES if phase.endswith("step")},
    ("fully sharded: later optimizer", "shape"): "its error",
    # The optimizer is over one replica, and so is what comes before the mesh is known: only that hears why.
    ("mesh: construction", "error"): "raised, ended",
    ("mesh: construction", "shape"): "raised, ended",
    # Stamps are those of a replica, and the other one sees it end.
    ("mesh: step", "skipped"): "raised, ended",
    ("mesh: step", "extra"): "raised, ended",
}
_NO_MEANING = {
    ("forward", "shape"): "inputs may differ in shape between ranks; what a module refuses is an exception",
    ("backward reduction", "shape"): "autograd refuses a gradient of another shape: that is an exception",
    ("backward to owners", "shape"): "autograd refuses a gradient of another shape: that is an exception",
    ("overlap", "shape"): "autograd refuses a gradient of another shape: that is an exception",
    ("clip", "shape"): "PyTorch refuses a gradient of another shape than its parameter",
    ("background", "shape"): "ranks compare what to save before the thread begins, see save_async",
    ("Join", "shape"): "a parameter of another shape is an exception of the module on this rank",
}
_SIZES = {
    **{("Join", failure): 3 for failure in FAILURES},
    **{(phase, failure): 3 for phase in ("forward", "consolidate", "save") for failure in FAILURES},
    **{("plain step", failure): 4 for failure in ("killed", "stopped", "slow")},
    **{(phase, failure): 4 for phase in PHASES if PHASES[phase].kind == "mesh" for failure in FAILURES},
    ("construction", "shape"): 4,
    ("overlap", "killed"): 4,
}
CELLS = tuple(
    Cell(
        phase,
        failure,
        "" if (phase, failure) in _NO_MEANING else _OTHER.get((phase, failure), _USUAL[failure]),
        _SIZES.get((phase, failure), 2),
        _NO_MEANING.get((phase, failure), ""),
    )
    for phase in PHASES
    for failure in FAILURES
)
RUN = tuple(cell for cell in CELLS if cell.outcome)


def _some() -> tuple[Cell, ...]:
    """A cell of each phase: failures in turns that mean something there."""
    chosen = []
    for number, phase in enumerate(PHASES):
        of_phase = [cell for cell in RUN if cell.phase == phase]
        chosen.append(of_phase[5 * number % len(of_phase)])
    return tuple(chosen)


QUICK = _some()


# ---------------------------------------------------------------------- running cells


@dataclass(frozen=True)
class Ending:
    """How a rank ended."""

    error: str | None
    seconds: float | None
    exitcode: int | None


@dataclass(frozen=True)
class Result:
    """How a cell ended."""

    cell: Cell
    endings: list[Ending]
    loaded: str | None = field(default="was not tried")

    @property
    def seconds(self) -> float:
        """Until the last survivor had raised."""
        return max(self.endings[rank].seconds or 0.0 for rank in self.survivors)

    @property
    def survivors(self) -> list[int]:
        """Ranks that have no trouble of their own."""
        return [rank for rank in range(self.cell.size) if rank != self.cell.bad]

    def complaint(self) -> str | None:
        """Say what is wrong with it; None if all is well."""
        outcome, bad, survivors = OUTCOMES[self.cell.outcome], self.cell.bad, self.survivors
        ends_early = -1 if bad == 0 else 0  # in Join
        if self.loaded is not None:
            return f"{self.cell}: the newest checkpoint: {self.loaded}"
        left = [ending.exitcode for ending in self.endings]
        wanted = [
            -signal.SIGKILL if rank == bad and self.cell.kind == "killed" else 0 for rank in range(len(left))
        ]
        if left != wanted:
            return f"{self.cell}: expected exit codes {wanted}, got {left}: {self.endings}"
        for ending in map(self.endings.__getitem__, survivors):
            said = str(ending.error)
            if self.cell.phase == "Join" and ending is self.endings[ends_early] and re.match(_IN_JOIN, said):
                continue
            if re.match(outcome.pattern.format(bad=bad), said, re.DOTALL) is None:
                return f"{self.cell}: expected {self.cell.outcome!r}, got {self.endings}"
            if outcome.passes_timeout is not None and ("stalled for" in said) != outcome.passes_timeout:
                when = "after the timeout" if outcome.passes_timeout else "at once"
                return f"{self.cell}: expected it {when}: {said}"
        if self.cell.kind != "killed" and self.endings[bad].error is None:
            return f"{self.cell}: the rank that had the trouble raised nothing"
        return None


def run_cells(cells: Sequence[Cell], folder: Path) -> list[Result]:
    """Run some cells side by side, then load the newest checkpoint of each."""
    folders = [folder / str(number) for number in range(len(cells))]
    with ThreadPoolExecutor(SIDE_BY_SIDE) as threads:
        ended = list(threads.map(_run, cells, folders))
    loaded = outcomes(1, load_newest, folders)[0].said
    return [Result(cell, *each) for cell, *each in zip(cells, ended, loaded, strict=True)]


def _run(cell: Cell, folder: Path) -> list[Ending]:
    ended = outcomes(
        cell.size,
        _play,
        cell,
        folder,
        meanwhile=partial(let_rank_go_on, cell.bad) if cell.kind == "stopped" else None,
        limit=LIMIT,
        as_script=True,
        rank_0_has_store=cell.bad == 0,
    )
    return [Ending(*(each.said or (None, None)), each.exitcode) for each in ended]


def _play(cell: Cell, folder: Path) -> tuple[str | None, float | None]:
    """Do what a rank does; gives its error, and the seconds since the trouble began."""
    is_at_once = OUTCOMES[cell.outcome].passes_timeout is False  # then a busy machine gets the time it needs
    error = None
    try:
        play(cell.kind, cell.bad, cell.phase, folder, LIMIT / 2 if is_at_once else TIMEOUT)
    except Exception as raised:  # noqa: BLE001 - it is what this is about
        error = f"{type(raised).__name__}: {raised}"
    return error, seconds_since_trouble()


def load_newest(folders: Sequence[Path]) -> list[str | None]:
    """Load the newest checkpoint below each folder in a run of one rank; gives what went wrong, by folder."""
    return [_load_newest(folder) for folder in folders]


def _load_newest(folder: Path) -> str | None:
    model = make_model()
    optimizer = ZeroRedundancyOptimizer(model.named_parameters(), Troubled, lr=0.1)
    newest = checkpoint.latest(folder)
    if newest is None:
        return "there is none"
    try:
        checkpoint.load(newest, model=model, optimizer=optimizer)
    except ZeroOptimError as error:
        return f"{type(error).__name__}: {error}"
    state = optimizer.state[model[0].weight]
    return None if state["step"] > 0 else "the state is empty"


# ---------------------------------------------------------------------- the table in the docs


def table(results: Sequence[Result] = ()) -> str:
    """Write the matrix as Markdown, and the longest seconds of each column; "?" where none were measured."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for phase in PHASES:
        outcomes = tuple(cell.outcome or "-" for cell in CELLS if cell.phase == phase)
        rows.setdefault(outcomes, []).append(phase)
    seconds = tuple(
        f"{max((each.seconds for each in results if each.cell.failure == failure), default=0):.1f}"
        if results
        else "?"
        for failure in FAILURES
    )
    lines = [f"| phase | {' | '.join(FAILURES.values())} |", f"|---|{'---|' * len(FAILURES)}"]
    lines += [f"| {'; '.join(phases)} | {' | '.join(outcomes)} |" for outcomes, phases in rows.items()]
    lines.append(f"| at most s | {' | '.join(seconds)} |")
    meanings = [f"- *{name}*: {outcome.meaning}" for name, outcome in OUTCOMES.items()]
    meanings.append("- `-`: this failure is an exception there, or cannot happen")
    return "\n".join([*lines, "", *meanings])


def without_seconds(text: str) -> str:
    """The same without what was measured."""
    return re.sub(r" \d+\.\d\b", " ?", text)
