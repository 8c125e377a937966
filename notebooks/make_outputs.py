"""Execute notebooks and write their outputs back: ``python notebooks/make_outputs.py [NAME.ipynb ...]``."""

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent


def executed(path: Path, timeout: int = 300) -> nbformat.NotebookNode:
    """Execute a copy of a notebook in its folder; what a cell raises is raised here.

    Args:
        path: of the notebook.
        timeout: seconds for each cell.
    """
    notebook = nbformat.read(path, as_version=4)
    options = {"timeout": timeout, "record_timing": False, "coalesce_streams": True}
    run = NotebookClient(notebook, resources={"metadata": {"path": str(FOLDER)}}, **options)
    return run.execute()


if __name__ == "__main__":
    for path in [FOLDER / name for name in sys.argv[1:]] or sorted(FOLDER.glob("*.ipynb")):
        nbformat.write(executed(path), path)
        print("executed", path.name)
