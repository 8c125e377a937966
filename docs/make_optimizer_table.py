"""Writes docs/optimizers.md from the tests' own checks of every class.

    python docs/make_optimizer_table.py

"yes" is written for a class only after `check_case` of tests/test_optimizers.py passed on two ranks, and
"refused" only after `check_refusal` did. A check that fails is written as "NO", and the script ends with an
error.
"""

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

from optimizer_cases import CASES, Case, Options, answer_of, write_options  # noqa: E402
from pool import Pool, RankError  # noqa: E402
from test_optimizers import check_case, check_refusal  # noqa: E402
from zero_optim.probe.cut_rows import why_not_cut  # noqa: E402
from zero_optim.probe.probe import probe  # noqa: E402
from zero_optim.probe.subject import under_test  # noqa: E402
from zero_optim.probe.traits import Traits  # noqa: E402

TARGET = ROOT / "docs" / "optimizers.md"
HEAD = f"""# Every optimizer class

Which classes were tried, and whether they can be sharded. To try another, build it on all ranks:

```python
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adafactor)  # raises if refused
print(optimizer.explain())  # shows what trials of the class found
```

Made by `python docs/make_optimizer_table.py`, which runs the checks of tests/test_optimizers.py on two ranks,
with PyTorch {torch.__version__.partition("+")[0]} on CPU and torch-optimizer 0.3.0. Do not edit.

Before a class is sharded, trials with the given options show whether

- each parameter's step is *separable*: it needs only this parameter's gradient and state; others are
  refused, unless `assume_separable=True`;
- one optimizer may step some of its parameters now and the others later (*in parts*, for `zero_step`);
- several ranks may own *rows* of one parameter.

Trials take 9 steps (of an entry: 64), with parameters of at most 8,192 elements (cuts: 45,056). They do not
see a coupling that needs more. A class that fails in half precision is refused for such parameters alone. A
class whose state cannot be saved and resumed is refused, unless `allow_unsaved=True`; then saving raises. A
class that uses an entry of its groups or state which differs between ranks is refused.

"Fails" lists the trials that a class does not pass. "Bitwise equal": the parameters after each of 13 steps,
and the saved state, are those of the unsharded optimizer, with default options and, for most, others.

## torch.optim and torch_optimizer

| fails | bitwise equal | classes |
|---|---|---|
"""


def failed_trials(name: str, options: Options, traits: Traits) -> str:
    """Return the trials that a class does not pass with these options."""
    bears_rows = why_not_cut(under_test(CASES[name].optimizer_class, options)) is None
    trials = {"separable": traits.separable, "in parts": traits.steppable_in_parts, "rows": bears_rows}
    return ", ".join(trial for trial, passed in trials.items() if not passed)


def answer(pool: Pool, name: str, case: Case, options: Options, traits: Traits) -> str:
    """Run a case and say what came out."""
    check = check_case if case.answer == "bitwise" else check_refusal
    try:
        pool.run(2, check, name, options)
    except RankError as error:
        sys.stderr.write(f"{name} with {write_options(options)}: {error}\n")
        return "NO: its check fails"
    reason = (traits.untried or traits.coupling or "").replace("|", "/")
    return f"{answer_of(case)} {reason}" if case.answer == "refused" else answer_of(case)


def rows(pool: Pool) -> Iterator[str]:
    """Make every line: one for classes that give the same. Options are named if they make a difference."""
    lines: dict[tuple[str, str], list[str]] = {}
    for name, case in CASES.items():
        results: dict[tuple[str, str], list[str]] = {}
        for options in case.options:
            traits = probe(under_test(case.optimizer_class, options))
            result = (failed_trials(name, options, traits), answer(pool, name, case, options, traits))
            results.setdefault(result, []).append(f"{name}({write_options(options)})")
        for result, same in results.items():
            lines.setdefault(result, []).extend([name] if len(results) == 1 else same)
    for (failed, equal), names in lines.items():
        yield f"| {failed} | {equal} | {'; '.join(names)} |"


def main() -> int:
    """Write the page; tell whether every check passed."""
    warnings.filterwarnings("ignore", message="This overload of", category=UserWarning)
    with Pool() as pool:
        lines = list(rows(pool))
    _, heading, other_packages = TARGET.read_text().partition("\n## Other packages")
    TARGET.write_text(HEAD + "\n".join(lines) + "\n" + heading + other_packages)
    failed = sum("| NO" in line for line in lines)
    sys.stderr.write(f"{TARGET}: {len(CASES)} classes, {len(lines)} rows, {failed} failed\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
