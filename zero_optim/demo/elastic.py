"""Launch the ranks on this host with PyTorch's elastic launcher, and report a failure in one line.

Note [How a run ends]
    The launcher is the parent. It turns SIGINT, SIGTERM, SIGHUP and SIGQUIT into an exception and ends its
    workers. Each worker has a session of its own, so a Ctrl-C at the terminal reaches only the parent, and
    once. When a worker fails or is killed, the launcher ends the others. When the parent itself is killed,
    `end_with_parent` ends the workers. Checkpoints stay complete in every case, see `zero_optim.checkpoint`.

Note [Files in place of sockets]
    PyTorch's store listens on every address of the host, and whoever reaches it can change what ranks read. A
    run of this launcher stays on one host. So the launcher and the ranks exchange addresses in files, in a
    private folder. Only gloo and NCCL listen, on the loopback interface.
"""

import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from types import FrameType
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from zero_optim.errors import InterruptedRunError, RankFailedError

if TYPE_CHECKING:
    from zero_optim.demo.config import RunConfig

# SIGINT kills a worker like any other signal, from its first line on: Python's own handler would
# answer with a traceback, and importing torch takes seconds.
WORKER = (
    "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "from zero_optim.demo.worker import main; main()"
)
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def launch(config: "RunConfig") -> None:
    """Run ``config.nproc`` ranks to their end. None still runs when this returns or raises.

    Raises:
        RankFailedError: a rank failed.
        InterruptedRunError: a signal arrived.
    """
    with _quiet(), signals_raise(), _no_store(), tempfile.TemporaryDirectory(prefix="zero-optim-") as folder:
        start = elastic_launch(_launch_config(config.nproc, folder), sys.executable)
        code = importing_from(sys.path, WORKER)
        try:
            start("-c", code, config.to_json(), str(os.getpid()), f"{folder}/ranks")
        except ChildFailedError as error:
            raise RankFailedError(describe(error.failures), first_failed(error.failures)) from None
        except SignalException as error:
            raise InterruptedRunError(error.sigval) from None


def _launch_config(nproc: int, folder: str) -> LaunchConfig:
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint=f"{folder}/launcher",
        rdzv_configs={"store_type": "file"},  # see Note [Files in place of sockets]
        local_addr="127.0.0.1",  # else the host's name is looked up, which may fail
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=folder),
        **_signals_option(),
    )


def importing_from(path: Sequence[str], code: str) -> str:
    """Make code for ``python -c`` that imports from this path only.

    Python puts the current folder first. A run, or a checkpoint of somebody else, may have left modules
    there.
    """
    return f"import sys; sys.path[:] = {[str(entry) for entry in path]!r}; {code}"


def _heard() -> list[signal.Signals]:
    """Return the signals that end a run, without those that the caller ignores, as nohup and shells do."""
    return [signum for signum in _SIGNALS if signal.getsignal(signum) is not signal.SIG_IGN]


def _signals_option() -> dict[str, Any]:
    """Tell the launcher which signals to handle. Older launchers have no such option and handle all four."""
    if "signals_to_handle" not in {field.name for field in fields(LaunchConfig)}:
        return {}
    return {"signals_to_handle": ",".join(signum.name for signum in _heard())}


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the launcher's own log off the terminal; `describe` says what matters in one line."""
    loggers = [logging.getLogger(f"torch.distributed.{name}") for name in ("elastic", "launcher")]
    before = [logger.propagate for logger in loggers]
    handler = logging.NullHandler()
    for logger in loggers:
        logger.propagate = False
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger, propagate in zip(loggers, before, strict=True):
            logger.propagate = propagate
            logger.removeHandler(handler)


@contextmanager
def _no_store() -> Iterator[None]:
    """Keep the elastic launcher from making a store for its workers, which listens on every address."""
    name = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@contextmanager
def signals_raise() -> Iterator[None]:
    """Handle signals until the launcher does so itself, and restore the old handlers at the end."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise InterruptedRunError(signum)

    before = {signum: signal.signal(signum, interrupt) for signum in _heard()}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def first_failed(failures: Mapping[int, ProcessFailure]) -> int:
    """Find the rank that failed first.

    A killed rank counts as first: the others fail because of it, and may report that earlier. SIGTERM does
    not count, since the launcher sends it to the remaining ranks. Nor does a signal that came when the rank
    had told why it failed: threads of C++ may abort a process that ends. Otherwise the earliest traceback is
    the cause, but for those of ranks that only heard of another one's failure: they may be quicker to raise.
    """
    killed = [rank for rank, failure in failures.items() if _was_killed(failure)]
    if killed:
        return killed[0]
    return min(failures, key=lambda rank: (_ended(failures[rank]), *_when(failures[rank])))


def describe(failures: Mapping[int, ProcessFailure]) -> str:
    """Say in one line how the rank that failed first did so.

    Args:
        failures: by rank.
    """
    rank = first_failed(failures)
    failure, report = failures[rank], _report(failures[rank])
    if _was_killed(failure):
        return f"rank {rank} was killed by {failure.signal_name()} (process {failure.pid})"
    if "text" in report:
        return f"rank {rank} failed{report['text']}"
    return f"rank {rank} ended with status {failure.exitcode} (process {failure.pid})"


def _was_killed(failure: ProcessFailure) -> bool:
    return failure.exitcode < 0 and not _report(failure) and not _ended(failure)


def _ended(failure: ProcessFailure) -> bool:
    return failure.exitcode == -signal.SIGTERM and not _report(failure)


def _when(failure: ProcessFailure) -> tuple[int, int]:
    """Tell whether a rank only heard of a failure, and when in ns: PyTorch's seconds are too coarse."""
    report = _report(failure)
    return ["", "later", "yes"].index(report.get("heard", "")), int(report.get("time_ns", sys.maxsize))


def _report(failure: ProcessFailure) -> dict[str, str]:
    """Return what `worker` recorded about a failure; empty if it could not."""
    message = failure.error_file_data.get("message")
    report = message.get("extraInfo", {}) if isinstance(message, dict) else {}
    return dict(report)
