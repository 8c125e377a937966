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
from zero_optim.probe.traits import Traits  # noqa: E402

TARGET = ROOT / "docs" / "optimizers.md"
HEAD = f"""# Every optimizer class

Made by `python docs/make_optimizer_table.py`, which runs the checks of tests/test_optimizers.py on two ranks,
with PyTorch {torch.__version__.partition("+")[0]} on CPU and torch-optimizer 0.3.0. Do not edit.

The last column answers: are the parameters after each of 13 steps, and the saved state, bit for bit those of
the unsharded optimizer? The four before it say what `zero_optim.probe` found by trying the class with
these options.

- separable: each parameter's step needs that parameter's own gradient and state only, so whole parameters can
  be given to different ranks. What is not separable is refused, unless `assume_separable=True`.
- in parts: one optimizer may step some of its parameters now and the others later.
- element-wise: a parameter may be cut anywhere.
- cut by rows: several ranks may own rows of one parameter, which are stepped as parameters of their own.
  This is also tried with other values for numbers that are zero, as a weight decay may be switched on later.

## Every set of options

| class | options | separable | in parts | element-wise | cut by rows | bitwise equal |
|---|---|---|---|---|---|---|
"""


def row(name: str, options: Options, traits: Traits, answer: str) -> str:
    """Write one line of the table."""
    bears_cuts = why_not_cut(CASES[name].optimizer_class, options) is None
    found = (traits.separable, traits.steppable_in_parts, traits.elementwise, bears_cuts)
    holds = ["yes" if trait else "no" for trait in found]
    cells = [f"`{name}`", f"`{write_options(options)}`", *holds, answer]
    return f"| {' | '.join(cells)} |"


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
    """Make every line, in the order of the cases."""
    for name, case in CASES.items():
        for options in case.options:
            traits = probe(case.optimizer_class, options)
            yield row(name, options, traits, answer(pool, name, case, options, traits))


def main() -> int:
    """Write the page; tell whether every check passed."""
    warnings.filterwarnings("ignore", message="This overload of", category=UserWarning)
    with Pool() as pool:
        lines = list(rows(pool))
    TARGET.write_text(HEAD + "\n".join(lines) + "\n")
    failed = sum("| NO" in line for line in lines)
    sys.stderr.write(f"{TARGET}: {len(CASES)} classes, {len(lines)} sets of options, {failed} failed\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
