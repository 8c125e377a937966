"""The notebooks run, and are committed with outputs that tell nothing about the machine they were made on."""

import getpass
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from make_outputs import executed

CHECKOUT = Path(__file__).parents[1]
FOLDER = CHECKOUT / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
# Absolute paths of file systems; "/" inside a word, a URL or a ratio is none.
PATHS = re.compile(r"(?<![\w./:])/(?:home|root|tmp|work|usr|var|opt|mnt|data|Users|private|__w)/\w")

each = pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])

# Each takes half a minute. Those that read records of benchmarks, or are new, run each time.
ALWAYS = ("03_overlap_with_ddp", "04_parameters_sharded")
RUN = [
    path if path.stem in ALWAYS else pytest.param(path, marks=pytest.mark.exhaustive) for path in NOTEBOOKS
]


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def texts(notebook: nbformat.NotebookNode) -> Iterator[str]:
    """Gives every text that a reader sees, and the metadata; pictures are left out."""
    yield str(notebook.metadata)
    for cell in notebook.cells:
        yield cell.source
        yield str(cell.metadata)
        for output in cell.get("outputs", []):
            yield output.get("text", "")
            yield from (str(value) for kind, value in output.get("data", {}).items() if "image" not in kind)


@pytest.mark.slow
@pytest.mark.parametrize("path", RUN, ids=[path.stem for path in NOTEBOOKS])
def test_a_notebook_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = path.read_bytes()
    monkeypatch.setenv("PYTHONPATH", str(CHECKOUT))
    done = executed(path)  # raises what a cell raises
    for cell, committed in zip(code_cells(done), code_cells(nbformat.read(path, as_version=4)), strict=True):
        assert kinds(cell) == kinds(committed), cell.outputs
    assert path.read_bytes() == before
    assert not (FOLDER / ".ipynb_checkpoints").exists()


def kinds(cell: nbformat.NotebookNode) -> list[str]:
    """Names what a cell gave: text, pictures; a wall of log lines or a warning would be an "stderr"."""
    return [output.get("name") or "image" * ("image/png" in output.data) for output in cell.outputs]


@each
def test_a_notebook_is_committed_with_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [
        output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"
    ]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert any(output.get("name") == "stdout" for output in outputs)


@each
def test_a_notebook_tells_nothing_about_where_it_was_made(path: Path) -> None:
    told = "\n".join(texts(nbformat.read(path, as_version=4)))
    assert PATHS.findall(told) == []
    names = {socket.gethostname(), getpass.getuser()} - {"localhost", "root"}  # "root" is a word
    assert [name for name in names if re.search(rf"\b{re.escape(name)}\b", told)] == []
