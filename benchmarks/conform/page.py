"""The text of docs/conformance.md, from the record."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from conform.causes import CAUSES, cause_of
from conform.loops import LOOPS
from conform.our_systems import SYSTEMS
from conform.trials import KINDS, TRIALS

RECORD = Path(__file__).parents[1] / "results" / "conformance.json"
PAGE = Path(__file__).parents[2] / "docs" / "conformance.md"
RIGHT = ("bits", "equal")
BAD = ("wrong", "hung", "dead")
Cells = dict[str, dict[str, dict[str, list[str]]]]

HEAD = """# Who trains which optimizer rightly

Made by `python benchmarks/conformance.py`. Do not edit. Every cell is one class, one loop and one system,
trained for 8 updates on two ranks (CPU, gloo), each with its own inputs, and compared with the unsharded
class on the mean of the same gradients. {versions}

{extent}

{counts}

- *equal*: the same parameters on both ranks up to rounding, most of them bit for bit. What counts as
  rounding: 1e-10 of the largest change of a parameter in float64 (1e-4 in float32), or 30 times what noise
  of one rounding in the gradients makes of the class, at most 0.02. Muon computes in bfloat16: 3 times what
  noise of 2^-8 makes. After *accumulate* two orders of sums are right: over the passes first, or over the
  ranks.
- *unclear*: more than that, and at most 3 times what noise makes. Noise moves SOAP by 0.2 to 0.7 of the way,
  also in float64; in float32 it moves Shampoo by 0.03 to 1.2, and LBFGS with clipping by 5.
- *refused*: both ranks raised. *hung*: one waited, or raised alone. *none*: the class itself cannot do
  this.
- **wrong**: it ended without an error, with other parameters. The number is that of the [cause](#causes).

Every system is used as its documentation says: its call for clipping, its save and load, `no_sync` or what
it has for it, `find_unused_parameters` where a parameter is frozen later, `refresh_trainable` of OSS.
DeepSpeed refuses most classes unless `zero_allow_untested_optimizer` is set, as it is here. FairScale and
DeepSpeed run in float32, the others in float64. *zero_optim 1*, *2*, *3* shard state, gradients and
parameters.

Loops: *clip* clips the global norm; *accumulate* has two backward passes in an update; *freeze* freezes the
middle of three blocks for two updates; *unfreeze* has it frozen from before wrapping until the fourth;
*groups* has two groups with options of their own and a schedule; *resume* saves and loads after half of the
updates; *uneven* has two batches less on one rank, with `Join`; *scaler* has a `GradScaler`, and an
infinity on one rank.

On 2026-11-27 a second run of all cells differed in four: Shampoo under ShardedDDP, which is at the limit of
*unclear*, in three loops; and once a thread of gloo aborted a rank of DDP (SparseAdam, *groups*), which 1,900
more runs of that cell did not show.
"""


def page_of(record: dict[str, Any]) -> str:
    """Return the page; a wrong cell without a cause is marked with "?"."""
    cells: Cells = record["cells"]
    names = [name for name in TRIALS if name in cells]
    lines = [
        HEAD.format(
            extent=_extent(cells, names),
            versions=_versions(record["versions"]),
            counts=_counts(cells, names),
        )
    ]
    lines += ["## By loop", "", *_by_loop(cells, names), "", "## By class", "", *_by_class(cells, names)]
    lines += ["", "## Causes", "", *_causes(cells, names), ""]
    return "\n".join(lines)


def _versions(versions: dict[str, str]) -> str:
    known = [f"{name} {value}" for name, value in sorted(versions.items()) if name != "zero_optim"]
    return f"Versions: {', '.join(known)}."


def _extent(cells: Cells, names: list[str]) -> str:
    run = sum(len(of_class) for name in names for of_class in cells[name].values())
    every = len(TRIALS) * len(SYSTEMS) * len(LOOPS)
    rest = "" if run == every else " `--missing` runs the others."
    return (
        f"{run:,} of {every:,} cells were run.{rest} All of them take about 15 minutes on two cores that do "
        "nothing else."
    )


def _counts(cells: Cells, names: list[str]) -> str:
    lines = [f"| | {' | '.join(system.title for system in SYSTEMS.values())} |"]
    lines.append("|---" * (1 + len(SYSTEMS)) + "|")
    for title, statuses in (("equal", RIGHT), ("refused", ("refused",)), ("**wrong**", ("wrong",)),
                            ("hung or crashed", ("hung", "dead")), ("unclear", ("unclear",)),
                            ("not offered", ("no",)), ("none", ("none",))):  # fmt: skip
        row = [
            sum(cell[0] in statuses for name in names for cell in cells[name].get(system, {}).values())
            for system in SYSTEMS
        ]
        lines.append(f"| {title} | {' | '.join(map(str, row))} |")
    return "\n".join(lines)


def _by_loop(cells: Cells, names: list[str]) -> Iterator[str]:
    """Count the answers of a loop over the classes whose plain loop is equal."""
    yield "Over the classes whose plain loop is equal in the system:"
    yield ""
    yield f"| loop | {' | '.join(system.title for system in SYSTEMS.values())} |"
    yield "|---" * (1 + len(SYSTEMS)) + "|"
    for loop in LOOPS:
        row = []
        for system in SYSTEMS:
            counts, numbers = Counter[str](), set[str]()
            for name in names:
                of_class = cells[name].get(system, {})
                if loop in of_class and of_class.get("plain", [""])[0] in RIGHT:
                    status = of_class[loop][0]
                    counts["equal" if status in RIGHT else status] += 1
                    if status in BAD:
                        numbers.add(_number(name, loop, system))
            row.append(_write_counts(counts, numbers))
        yield f"| {loop} | {' | '.join(row)} |"


def _write_counts(counts: Counter[str], numbers: set[str]) -> str:
    counts.pop("none", None)
    words = {"no": "not offered", "wrong": "**wrong**", "hung": "**hung**", "dead": "**crashed**"}
    causes = f" [{', '.join(sorted(numbers, key=lambda number: (len(number), number)))}]" if numbers else ""
    if not counts:
        return ""
    if len(counts) == 1:
        status = next(iter(counts))
        return words.get(status, status) + causes
    return (
        ", ".join(f"{words.get(status, status)} {count}" for status, count in counts.most_common()) + causes
    )


def _by_class(cells: Cells, names: list[str]) -> Iterator[str]:
    """Write what the plain loop gives, and the loops that are worse where the class matters."""
    yield "The plain loop; behind it the loops in which this class differs from the table above."
    for kind, title in KINDS.items():
        yield f"\n**{title[0].upper()}{title[1:]}**\n"
        yield f"| class | {' | '.join(system.title for system in SYSTEMS.values())} |"
        yield "|---" * (1 + len(SYSTEMS)) + "|"
        for name in names:
            if TRIALS[name].kind == kind:
                yield f"| {name} | {' | '.join(_of_class(cells, name, system) for system in SYSTEMS)} |"


def _of_class(cells: Cells, name: str, system: str) -> str:
    of_class = cells[name].get(system)
    if not of_class:
        return ""
    text = _word(of_class["plain"][0], name, "plain", system) if "plain" in of_class else ""
    others: dict[str, list[str]] = {}
    for loop, (status, _) in of_class.items():
        common = of_class.get("plain", [""])[0] not in RIGHT or status in (*RIGHT, "none", "no")
        if loop == "plain" or common or _is_common(cells, loop, system, status):
            continue
        others.setdefault(_word(status, name, loop, system), []).append(loop)
    return "; ".join([text, *(f"{word}: {', '.join(loops)}" for word, loops in others.items())])


def _is_common(cells: Cells, loop: str, system: str, status: str) -> bool:
    """Whether most classes have this answer in the loop."""
    statuses = [
        of[system][loop][0]
        for of in cells.values()
        if system in of and loop in of[system] and of[system].get("plain", [""])[0] in RIGHT
    ]
    return statuses.count(status) > len(statuses) / 2


def _word(status: str, name: str, loop: str, system: str) -> str:
    if status in RIGHT:
        return "equal"
    if status in BAD:
        word = {"wrong": "wrong", "hung": "hung", "dead": "crashed"}[status]
        return f"**{word}** [{_number(name, loop, system)}]"
    return {"no": "not offered"}.get(status, status)


def _number(name: str, loop: str, system: str) -> str:
    return str(cause_of(name, loop, system) or "?")


def _causes(cells: Cells, names: list[str]) -> Iterator[str]:
    yield "Each script needs torchrun, and shows the difference without this benchmark."
    yield ""
    counts = Counter(
        _number(name, loop, system)
        for name in names
        for system, of_class in cells[name].items()
        for loop, (status, _) in of_class.items()
        if status in BAD
    )
    for number, cause in enumerate(CAUSES, 1):
        where = ", ".join(SYSTEMS[system].title for system in cause.systems)
        documented = " Documented." if cause.documented else ""
        yield f"{number}. **{cause.title}** ({where}; {counts[str(number)]} cells). {cause.text}{documented}"
        yield f"   [{cause.script}](../benchmarks/reproducers/{cause.script})"
