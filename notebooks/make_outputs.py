"""Execute notebooks and write their outputs back: ``python notebooks/make_outputs.py [NAME.ipynb ...]``."""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from traitlets.config import Config

FOLDER = Path(__file__).parent
PATIENCE = 400  # seconds that only a hang reaches: for a kernel to start, and for the last outputs of a cell


def executed(path: Path, timeout: int = 300) -> nbformat.NotebookNode:
    """Execute a copy of a notebook in its folder; what a cell raises is raised here.

    Args:
        path: of the notebook.
        timeout: seconds for each cell.
    """
    notebook = nbformat.read(path, as_version=4)
    run_cells(notebook, FOLDER, timeout=timeout, record_timing=False, coalesce_streams=True)
    return notebook


def run_cells(notebook: nbformat.NotebookNode, folder: Path, **options: Any) -> None:
    """Execute a notebook in place, in a kernel that starts in ``folder``.

    The kernel is reached over sockets in a temporary folder: the free TCP ports that would be chosen for it
    can be taken by another process before it binds them. Outputs come on another socket than the word that a
    cell is done, and on a busy machine later. Outputs that are missing when the patience ends raise.
    """
    patience = {"startup_timeout": PATIENCE, "iopub_timeout": PATIENCE, "raise_on_iopub_timeout": True}
    with tempfile.TemporaryDirectory() as sockets:
        over_ipc = Config({"KernelManager": {"transport": "ipc", "ip": f"{sockets}/kernel"}})
        client = NotebookClient(
            notebook, config=over_ipc, resources={"metadata": {"path": str(folder)}}, **patience, **options
        )
        client.execute(env=dict(os.environ))


if __name__ == "__main__":
    for path in [FOLDER / name for name in sys.argv[1:]] or sorted(FOLDER.glob("*.ipynb")):
        nbformat.write(executed(path), path)
        print("executed", path.name)
