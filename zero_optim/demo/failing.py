"""How a rank tells the launcher why it failed."""

import json
import os
import time
import traceback
from pathlib import Path

from zero_optim.errors import CheckpointError, DivergedError, RemoteRankError

_EXPECTED = (DivergedError, BrokenPipeError, CheckpointError)  # their message is enough, without a traceback


def record_failure(error: Exception) -> None:
    """Write a failure to the launcher's error file."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        write_failure(error, Path(path))


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
    path.write_text(json.dumps({"message": message}))
