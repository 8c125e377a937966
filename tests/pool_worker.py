"""Runs in the processes of ``pool``: it runs each call in a new process group, and sends the result."""

import faulthandler
import gc
import os
import pickle
import random
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

import sockets
from on_device import on_device
from zero_optim.run.rank import destroy_group, end_with_parent, use_loopback
from zero_optim.run.stacks import answer_with_stacks, traceback_text

if TYPE_CHECKING:
    from multiprocessing.connection import Connection


Filter = tuple[Any, str, Any, str, int]  # arguments of ``warnings.filterwarnings``


@dataclass(frozen=True)
class Request:
    """One rank's part of a call."""

    call: bytes  # pickled (function, args); unpickled late, where an error can be reported
    rank: int
    world_size: int
    group_name: str
    group_timeout: float  # seconds
    filters: list[Filter]
    device: str  # type of the device that tests run on
    on_sockets: bool  # and not through memory, see zero_optim.share_host_memory


@dataclass(frozen=True)
class Reply:
    """The answer of a rank: what the function returned, pickled, or a failure, usually a traceback."""

    value: bytes = b""
    failure: str = ""


def serve(connection: "Connection[Any, Any]", stack_file: Path, store_port: int) -> None:
    """Answers requests until the pipe closes. The entry point of a worker process.

    It connects to the pool's store once, not at every call: for each connection PyTorch asks the name server
    for the name of 127.0.0.1, which took 5 seconds where the name server drops a request now and then.
    """
    # No worker outlives the test run, however that ends. A forked one ends with its server, which does so
    # when the test run ends.
    end_with_parent(os.getppid())
    # Ctrl-C reaches the whole terminal session, and the parent ends the workers. Not SIG_IGN, since processes
    # that a test starts would inherit it.
    signal.signal(signal.SIGINT, lambda *_: None)
    torch.set_num_threads(1)
    use_loopback()
    with answer_with_stacks(stack_file) as stacks:
        # A crash of a thread that has no Python, such as gloo's, is told by its native stack, on stderr.
        torch._C._set_print_stack_traces_on_fatal_signal(True)  # type: ignore[attr-defined]
        store = dist.TCPStore("127.0.0.1", store_port, is_master=False)  # type: ignore[attr-defined]
        connection.send_bytes(b"listening")
        while True:
            try:
                request = pickle.loads(connection.recv_bytes())
            except EOFError:
                return
            faulthandler.enable(stacks)
            faulthandler.register(signal.SIGUSR1, stacks)  # again: Lightning's Trainer resets all handlers
            store.set_timeout(timedelta(seconds=request.group_timeout))
            own_store = dist.PrefixStore(request.group_name, store)  # type: ignore[attr-defined]
            connection.send_bytes(pickle.dumps(_answer(request, own_store, connection)))


def _answer(request: Request, store: dist.Store, connection: "Connection[Any, Any]") -> Reply:  # type: ignore[name-defined]
    stray: list[str] = []
    try:
        _reset_state()
        with warnings.catch_warnings(), _collecting(stray):
            warnings.resetwarnings()
            for rule in reversed(request.filters):  # each goes before those already there
                warnings.filterwarnings(*rule)
            value = _in_process_group(request, store, connection, stray)
            _collect_all()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - the parent reports it, pytest's failures too
        return Reply(failure="\n".join([traceback_text(error, __file__), *stray]) + "\n")
    return Reply(failure="\n".join(stray)) if stray else Reply(value)


def _collect_all() -> None:
    """Collect the garbage of this call, so that an error in a destructor belongs to it, not to the next one.

    Most objects that are still alive then are modules. After the freeze, the next collection skips them,
    which saves 0.1 s a call. It would also skip what becomes garbage only while other garbage is freed, for
    ever: parameters that autograd's nodes hold, and with them a process group with its threads. So it is
    collected until there is none.
    """
    while gc.collect():
        pass
    gc.freeze()


def _in_process_group(
    request: Request,
    store: dist.Store,  # type: ignore[name-defined]
    connection: "Connection[Any, Any]",
    stray: list[str],
) -> bytes:
    timeout = timedelta(seconds=request.group_timeout)
    dist.init_process_group(
        "gloo", store=store, rank=request.rank, world_size=request.world_size, timeout=timeout
    )
    sockets.keep_to(request.on_sockets)
    device = torch.device(request.device)
    if device.type == "cuda":
        device = torch.device("cuda", request.rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    function, args = pickle.loads(request.call)
    with on_device(device):
        # Pickle sends a tensor's bytes; the pickler of multiprocessing a handle to this process's memory.
        value = pickle.dumps(function(*args))
    if stray:  # a failure, which is reported
        return value
    # Groups end when every rank is done: a rank that still connects fails if the other side has closed. So
    # the parent first collects all replies, and then sends "end".
    connection.send_bytes(pickle.dumps(Reply(value)))
    connection.recv_bytes()
    # A rank that raised skips this: its process will be killed, and the other ranks may be stuck elsewhere.
    destroy_group()
    return value


def _reset_state() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)


@contextmanager
def _collecting(stray: list[str]) -> Iterator[None]:
    """Collect exceptions that Python only prints: those in destructors and in threads."""

    def note(event: Any) -> None:
        lines = traceback.format_exception(event.exc_type, event.exc_value, event.exc_traceback)
        stray.append("".join(lines))

    hooks = sys.unraisablehook, threading.excepthook
    sys.unraisablehook = threading.excepthook = note
    try:
        yield
    finally:
        sys.unraisablehook, threading.excepthook = hooks
