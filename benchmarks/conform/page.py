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

HEAD = """# Optimizer classes in every system

Which library trains which optimizer class right, in which loop; which refuses it; and which ends with other
weights and no error, with a script for each cause.

```
python benchmarks/conformance.py  # makes this page; do not edit it
```

Each cell trains one class in one loop and one system for 8 updates on two ranks (CPU, gloo), with other
inputs on each rank. Its parameters are compared with those of the unsharded class on the mean of the same
gradients. {versions}

{extent}

{counts}

- *equal*: the same parameters on both ranks up to rounding, most of them bit for bit. Rounding is 1e-10 of
  the largest change of a parameter in float64 (1e-4 in float32), or 30 times the effect of one rounding in
  the gradients, at most 0.02. For Muon, in bfloat16, it is 3 times the effect of noise of 2^-8.
- *unclear*: more than that, and at most 3 times the effect of noise.
- *refused*: both ranks raised. *hung*: one rank waited, or raised alone. *none*: the class itself cannot do
  it.
- **wrong**: training ended without an error, with other parameters. The number is that of the
  [cause](#causes).

Each system is used as its documentation says, with its own calls for clipping, saving and loading, and
`find_unused_parameters` if a parameter is frozen later. DeepSpeed refuses most classes without
`zero_allow_untested_optimizer`, so it is set; so is our `allow_unsaved` for Lookahead. On FSDP2 both save
with DCP, ours heavyball's and schedulefree's state with `checkpoint.save`. FairScale and DeepSpeed
run in float32, the others in float64.
*zero_optim 1*, *2*, *3* shard state, gradients and parameters.

Loops: *clip* clips the global norm. *Accumulate* has two backward passes in an update; both orders of sums
count as equal. *Freeze* freezes the middle of three blocks for two updates. In *unfreeze* that block is
frozen from before wrapping until the fourth update. *Groups* has two groups with options of their own and a
schedule. *Resume* saves and loads after half of the updates. *Uneven* has two batches less on one rank,
with `Join`. *Scaler* has a `GradScaler`, and an infinity on one rank.
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
    return f"{run:,} of {every:,} cells were run.{rest}"


def _table(first: str, rows: dict[str, dict[str, str]]) -> Iterator[str]:
    """Write a row for each name, with one cell for systems of a family that have the same column."""
    columns: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for system in SYSTEMS:
        family, column = system.rstrip("123"), tuple(row[system] for row in rows.values())
        columns.setdefault((family, column), []).append(system)
    titles = [", ".join([SYSTEMS[first].title, *(system[-1] for system in others)])
              for first, *others in columns.values()]  # fmt: skip
    yield f"| {first} | {' | '.join(titles)} |"
    yield "|---" * (1 + len(titles)) + "|"
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, row in rows.items():
        alike.setdefault(tuple(row[systems[0]] for systems in columns.values()), []).append(name)
    for cells, names in alike.items():
        yield f"| {', '.join(names)} | {' | '.join(cells)} |"


def _counts(cells: Cells, names: list[str]) -> str:
    rows = {}
    for title, statuses in (("equal", RIGHT), ("refused", ("refused",)), ("**wrong**", ("wrong",)),
                            ("hung or crashed", ("hung", "dead")), ("unclear", ("unclear",)),
                            ("not offered", ("no",)), ("none", ("none",))):  # fmt: skip
        answers = {
            system: [cell[0] for name in names for cell in cells[name].get(system, {}).values()]
            for system in SYSTEMS
        }
        rows[title] = {system: str(sum(map(found.count, statuses))) for system, found in answers.items()}
    return "\n".join(_table("", rows))


def _by_loop(cells: Cells, names: list[str]) -> Iterator[str]:
    """Count the answers of a loop over the classes whose plain loop is equal."""
    yield "Over the classes whose plain loop is equal in the system:"
    yield ""
    rows: dict[str, dict[str, str]] = {}
    for loop in LOOPS:
        row = rows[loop] = {}
        for system in SYSTEMS:
            counts, numbers = Counter[str](), set[str]()
            for name in names:
                of_class = cells[name].get(system, {})
                if loop in of_class and of_class.get("plain", [""])[0] in RIGHT:
                    status = of_class[loop][0]
                    counts["equal" if status in RIGHT else status] += 1
                    if status in BAD:
                        numbers.add(_number(name, loop, system))
            row[system] = _write_counts(counts, numbers)
    yield from _table("loop", rows)


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
    yield "The plain loop, then the loops in which the class differs from the table above."
    yield ""
    rows = {
        name: {system: _of_class(cells, name, system) for system in SYSTEMS}
        for kind in KINDS  # beside each other
        for name in names
        if TRIALS[name].kind == kind
    }
    yield from _table("class", rows)


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
    counts = Counter(
        _number(name, loop, system)
        for name in names
        for system, of_class in cells[name].items()
        for loop, (status, _) in of_class.items()
        if status in BAD
    )
    for number, cause in enumerate(CAUSES, 1):
        documented = " Documented." if cause.documented else ""
        yield f"{number}. **{cause.title}** ({counts[str(number)]} cells). {cause.text}{documented}"
        yield f"   [{cause.script}](../benchmarks/reproducers/{cause.script})"
