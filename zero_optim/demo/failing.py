"""How a rank tells the launcher why it failed."""

import json
import os
import time
import traceback
from pathlib import Path

from zero_optim.errors import CheckpointError, DivergedError, RemoteRankError
from zero_optim.run.host import let_the_cause_end_first

_EXPECTED = (DivergedError, BrokenPipeError, CheckpointError)  # their message is enough, without a traceback


def record_failure(error: Exception) -> None:
    """Write a failure to the launcher's error file; then a rank that only heard of it lets the cause end."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        write_failure(error, Path(path))
    let_the_cause_end_first(error)


def only_heard(path: Path) -> bool:
    """Tell whether a failure that was written to a file is that another rank has failed."""
    return bool(json.loads(path.read_text())["message"]["extraInfo"]["heard"])


def write_failure(error: Exception, path: Path) -> None:
    """Write a failure to a file, in the format of PyTorch's launcher.

    Added are the time in ns, and whether this rank only heard that another one has failed.
    """
    trace = "".join(traceback.format_exception(error)).rstrip()
    info = {
        "py_callstack": trace,
        "timestamp": str(int(time.time())),
        "time_ns": str(time.time_ns()),
        "heard": "yes" if isinstance(error, RemoteRankError) else "",
        "text": f": {error}" if isinstance(error, _EXPECTED) else ":\n" + trace,
    }
    message = {"message": f"{type(error).__name__}: {error}", "extraInfo": info}
    part = path.with_suffix(".part")  # the launcher may look at any time, and may end this rank
    part.write_text(json.dumps({"message": message}))
    part.replace(path)
