"""How a rank tells the launcher why it failed."""

import json
import os
import time
import traceback
from pathlib import Path

from zero_optim.errors import CheckpointError, DivergedError, message_of
from zero_optim.run.host import let_the_cause_end_first, order_of

_EXPECTED = (DivergedError, BrokenPipeError, CheckpointError)  # their message is enough, without a traceback
# By `order_of`: what a rank did itself; what came while it dealt with that; what it only heard of.
_HEARD = {1: "", 2: "later", 3: "yes"}


def record_failure(error: Exception) -> None:
    """Write a failure to the launcher's error file; then a rank that only heard of it lets the cause end."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        write_failure(error, Path(path))
    let_the_cause_end_first(error, _all_have_told)


def _all_have_told() -> bool:
    """Tell whether all ranks of the run have written why they failed, as far as one host can see that."""
    path, here = os.environ.get("TORCHELASTIC_ERROR_FILE"), os.environ["LOCAL_WORLD_SIZE"]
    if not path or here != os.environ["WORLD_SIZE"]:
        return False
    own = Path(path)  # PyTorch's launcher gives each local rank a folder
    return len(list(own.parent.parent.glob(f"*/{own.name}"))) == int(here)


def write_failure(error: Exception, path: Path) -> None:
    """Write a failure to a file, in the format of PyTorch's launcher.

    Added are the time in ns, and whether this rank only heard that another one has failed.
    """
    now = time.time_ns()  # before anything that may be slow, such as a message of the user's
    trace = "".join(traceback.format_exception(error)).rstrip()
    info = {
        "py_callstack": trace,
        "timestamp": str(int(time.time())),
        "time_ns": str(now),
        "heard": _HEARD[order_of(error)],
        "text": f": {message_of(error)}" if isinstance(error, _EXPECTED) else ":\n" + trace,
    }
    message = {"message": f"{type(error).__name__}: {message_of(error)}", "extraInfo": info}
    part = path.with_suffix(".part")  # the launcher may look at any time, and may end this rank
    part.write_text(json.dumps({"message": message}))
    part.replace(path)
