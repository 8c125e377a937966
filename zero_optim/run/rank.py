"""A rank of `launch`: a new process that calls a function in a process group, and reports by files.

Note [Which failure is reported]
    When a rank fails, others lose connections, fail too, and may end first. So each rank writes the time of
    its exception before it closes anything. A killed rank, which writes nothing, comes first, an exception
    that only repeats another rank's last.
"""

import ctypes
import gc
import importlib.util
import json
import linecache
import os
import pickle
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from time import monotonic, monotonic_ns, sleep
from typing import Any

import torch
import torch.distributed as dist

from zero_optim.errors import StalledError, is_remote
from zero_optim.run.stacks import answer_with_stacks, traceback_text

_CAUSE = 120.0  # seconds that a rank which only heard of a failure gives the one that failed, on a busy host
_LOST = 10.0  # seconds for ranks that do not answer, or have closed their connections
_CLOSED = ("onnection closed by peer", "onnection reset by peer")  # what gloo says, and NCCL


@dataclass(frozen=True, slots=True)
class Failure:
    """A rank's failure."""

    rank: int
    order: list[int]  # smaller for causes than for consequences
    text: str  # the traceback, or what is known without one
    line: str  # the kind of exception, or the same as ``text``


@dataclass(frozen=True, slots=True)
class Job:
    """What the caller and the ranks share."""

    folder: str  # where they leave files for each other
    nproc: int
    backend: str
    threads: int  # of PyTorch, on each rank
    parent: int  # process id of the caller

    def path(self, name: str, rank: int | None = None) -> Path:
        """Return the path of a file, of one rank or of all."""
        return Path(self.folder, name if rank is None else f"{name}-{rank}")

    def failures(self, processes: Sequence[BaseProcess]) -> list[Failure]:
        """Return the failures so far, the cause first."""
        failures = (self._failure(rank, process.exitcode) for rank, process in enumerate(processes))
        return sorted(filter(None, failures), key=lambda failure: failure.order)

    def _failure(self, rank: int, exitcode: int | None) -> Failure | None:
        if self.path("failure", rank).exists():
            return Failure(**json.loads(self.path("failure", rank).read_text()))
        if exitcode is None or (exitcode == 0 and self.path("value", rank).exists()):
            return None
        named = {each.value: each.name for each in signal.Signals}.get(-exitcode, f"signal {-exitcode}")
        line = f"was killed by {named}" if exitcode < 0 else f"ended with status {exitcode}"
        why = ""
        if not self.path("begun", rank).exists():
            why = (
                " before it could begin: what it printed says why. A script that calls launch() needs "
                '`if __name__ == "__main__":` around that code, since the ranks import the script'
            )
        return Failure(rank, [0, rank], line + why, line)

    def all_have_reported(self) -> bool:
        """Return whether every rank has reported a value or a failure."""
        return all(
            any(self.path(name, rank).exists() for name in ("failure", "value")) for rank in range(self.nproc)
        )


def end_with_parent(parent: int) -> None:
    """Have Linux kill this process with its parent (a process id), even if it hangs in C++; called once."""
    if ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL):  # PR_SET_PDEATHSIG of linux/prctl.h
        raise OSError(ctypes.get_errno(), "Linux does not kill a rank with its parent")
    if os.getppid() != parent:  # it ended before the kernel was asked
        os._exit(1)


def use_loopback() -> None:
    """Make later process groups use the loopback interface, which no other machine reaches."""
    name = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    os.environ["GLOO_SOCKET_IFNAME"] = name
    os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def enter(rank: int, job: Job) -> None:
    """Run as a rank: call the function in a process group, and report how it ended."""
    end_with_parent(job.parent)
    os.setsid()
    signal.signal(signal.SIGINT, lambda *_: None)  # not SIG_IGN, which processes started here would inherit
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    answer_with_stacks(job.path("stacks", rank))
    job.path("begun", rank).touch()
    try:
        _run(rank, job)
        destroy_group()  # here, as nothing of the call is left
    except BaseException as error:  # noqa: BLE001 - the caller raises for all of them
        now = monotonic_ns()  # one clock for all processes of a host
        text = traceback_text(error, __file__)  # without the frames of this file
        failure = Failure(rank, [order_of(error), now], text, type(error).__name__)
        part = job.path("part", rank)
        part.write_text(json.dumps(asdict(failure)))
        part.rename(job.path("failure", rank))
        sys.stdout.flush()
        sys.stderr.flush()
        if failure.order[0] > 1:  # the one that failed ends first, as the launcher then ends all
            is_certain = is_remote(error) and not isinstance(error, StalledError)
            deadline = monotonic() + (_CAUSE if is_certain else _LOST)
            while monotonic() < deadline and not job.all_have_reported():
                sleep(0.05)
        os._exit(1)  # without destroying the process group, which may take for ever


def _run(rank: int, job: Job) -> None:
    torch.set_num_threads(job.threads)
    use_loopback()
    size = str(job.nproc)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    if job.path("prepare").exists():
        prepare, _ = decode_call(job.path("prepare").read_bytes())
        prepare(rank)
    device: dict[str, Any] = {}
    if job.backend.startswith("nccl"):  # PyTorch 2.15 has nccl2 too
        torch.cuda.set_device(rank)
        device = {"device_id": torch.device("cuda", rank)}
    store = dist.FileStore(str(job.path("store")), job.nproc)  # type: ignore[attr-defined]
    dist.init_process_group(job.backend, store=store, rank=rank, world_size=job.nproc, **device)
    # A rank that ends early would break the connections of those that still connect.
    if store.add("connected", 1) == job.nproc:
        store.set("all connected", "")
    store.wait(["all connected"])
    fn, args = decode_call(job.path("call").read_bytes())
    value = fn(*args)
    for thread in threading.enumerate():
        if thread.name == "zero_optim save":  # which nobody has waited for, and which needs the group
            thread.join()
    # Like pickle, but tensors that share memory are written once, and classes of a notebook can be returned.
    kind = "pickle" if importlib.util.find_spec("cloudpickle") is None else "cloudpickle"
    torch.save(value, job.path("value", rank), pickle_module=importlib.import_module(kind))


def destroy_group() -> None:
    """Destroy the default process group, if there is one, after the wrappers that nobody uses any more."""
    # PyTorch's DDP in a cycle, the last to refer to a group, frees it under the GIL, and may wait for ever
    # for a thread of gloo that needs the GIL.
    for _ in range(10):  # though a thread of the user may make garbage all the time
        if not gc.collect():  # what one collection frees may have held more
            break
    if dist.is_initialized():
        dist.destroy_process_group()


def encode_call(function: Callable[..., object], args: tuple[object, ...]) -> bytes:
    """Encode a call for all ranks, or raise TypeError; cloudpickle sends code, with a notebook's lines."""
    name, main = getattr(function, "__qualname__", repr(function)), sys.modules["__main__"]
    is_typed = getattr(main, "__spec__", None) is None and not hasattr(main, "__file__")  # at a prompt
    needs_code = getattr(function, "__module__", None) == "__main__" and is_typed
    try:
        if not (needs_code or "<locals>" in name or "<lambda>" in name):
            return pickle.dumps((function, args, {}))
        if importlib.util.find_spec("cloudpickle") is None:
            raise TypeError("no import finds it, and cloudpickle is not installed (pip install cloudpickle)")
        import cloudpickle

        cells = {key: entry for key, entry in linecache.cache.items() if len(entry) > 1 and entry[1] is None}
        encoded: bytes = cloudpickle.dumps((function, args, cells))
    except (pickle.PicklingError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise TypeError(
            f"{name} cannot be sent to new processes with its arguments and what it uses: {error}. Make such "
            "things on the ranks, inside the function, or define them in a module"
        ) from error
    return encoded


def decode_call(call: bytes) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Decode what `encode_call` wrote."""
    function, args, sources = pickle.loads(call)
    linecache.cache.update(sources)
    return function, args


def order_of(error: BaseException) -> int:
    """Return a failure's place: 1 of this rank itself; 3 of another rank; 2 a 3 in the handling of a 1."""
    is_closed = isinstance(error, RuntimeError) and any(words in str(error) for words in _CLOSED)
    if not is_remote(error) and not is_closed:
        return 1
    # What a wait raised is `__cause__`; what was raised before the wait began is the context of that.
    waited = error.__cause__ or error
    before = waited.__context__
    return 2 if before is not None and order_of(before) < 3 else 3
