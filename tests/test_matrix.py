"""Every failure in every phase: all other ranks name the cause, no process is left, checkpoints load."""

from pathlib import Path

import pytest

from jitter import run_jittery
from matrix import BEGIN, CELLS, END, QUICK, RUN, Cell, run_cells, table, without_seconds
from troubled import PHASES


def check(cells: tuple[Cell, ...], folder: Path) -> None:
    """Run some cells, and show all that go wrong."""
    complaints = [complaint for result in run_cells(cells, folder) if (complaint := result.complaint())]
    assert not complaints, "\n".join(complaints)


@pytest.mark.slow
def test_a_failure_in_any_phase_is_named_on_all_other_ranks(tmp_path: Path) -> None:
    check(QUICK, tmp_path)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("phase", PHASES)
def test_every_failure_in_a_phase_is_named_on_all_other_ranks(tmp_path: Path, phase: str) -> None:
    check(tuple(cell for cell in RUN if cell.phase == phase and cell not in QUICK), tmp_path)


def test_the_matrix_has_every_failure_in_every_phase_or_the_reason_why_not() -> None:
    assert len(RUN) >= 48
    assert {cell.size for cell in RUN} == {2, 3, 4}
    assert all(bool(cell.outcome) != bool(cell.reason) for cell in CELLS)
    assert {cell.phase for cell in QUICK} == set(PHASES)


def test_the_table_in_the_docs_is_that_of_the_tests() -> None:
    page = (Path(__file__).parents[1] / "docs" / "failures.md").read_text()
    told = page.partition(BEGIN)[2].partition(END)[0]
    assert without_seconds(told).strip() == table().strip(), "run python docs/make_failure_table.py"


@pytest.mark.slow
@pytest.mark.exhaustive
def test_ranks_that_pause_for_up_to_half_of_the_timeout_raise_no_alarm() -> None:
    for said in run_jittery(2000, timeout=4.0, long=2):
        assert isinstance(said, tuple), said
