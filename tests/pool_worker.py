"""Runs in the processes of ``pool``: it runs each call in a new process group, and sends the result."""

import ctypes
import faulthandler
import gc
import multiprocessing
import os
import pickle
import random
import signal
import socket
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

import late_backend

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

PR_SET_PDEATHSIG = 1  # from <sys/prctl.h>


@dataclass(frozen=True)
class Filter:
    """The arguments of one ``warnings.filterwarnings``."""

    action: Any  # one of the words that warnings.filterwarnings knows
    message: str
    category: Any  # a class of warnings
    module: str
    line: int


@dataclass(frozen=True)
class Request:
    """One rank's part of a call."""

    call: bytes  # pickled (function, args); unpickled late, where an error can be reported
    rank: int
    world_size: int
    store_port: int
    group_name: str
    group_timeout: float  # seconds
    filters: list[Filter]
    late_seed: int | None  # of the backend that lies in wait; None for gloo


class Reply:
    """The answer of a rank."""


@dataclass(frozen=True)
class Success(Reply):
    """The function returned."""

    value: bytes  # pickled


@dataclass(frozen=True)
class Failure(Reply):
    """The function raised, or something around it did."""

    text: str  # usually a traceback


def serve(connection: "Connection[Any, Any]", stack_file: Path) -> None:
    """Answers requests until the pipe closes. The entry point of a worker process."""
    _die_with_parent()
    # Ctrl-C reaches the whole terminal session, and the parent ends the workers. Not SIG_IGN, since processes
    # that a test starts would inherit it.
    signal.signal(signal.SIGINT, lambda *_: None)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = _loopback_interface()
    with stack_file.open("w") as stacks:
        faulthandler.enable(stacks)
        faulthandler.register(signal.SIGUSR1, stacks)
        connection.send_bytes(b"listening")
        while True:
            try:
                request = pickle.loads(connection.recv_bytes())
            except EOFError:
                return
            connection.send_bytes(pickle.dumps(_answer(request, connection)))


def _answer(request: Request, connection: "Connection[Any, Any]") -> Reply:
    stray: list[str] = []
    try:
        _reset_state()
        with warnings.catch_warnings(), _StrayExceptions(stray):
            warnings.resetwarnings()
            for rule in reversed(request.filters):  # each goes before those already there
                warnings.filterwarnings(rule.action, rule.message, rule.category, rule.module, rule.line)
            value = _in_process_group(request, connection, stray)
            # So that an error in a destructor belongs to this call, not to the next one. Most objects that
            # are still alive are modules. After the freeze, the next collection skips them, which saves 0.1 s
            # a call.
            gc.collect()
            gc.freeze()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - the parent reports it, pytest's failures too
        # The first frames are of this file, and always the same.
        own = error.__traceback__
        while own is not None and own.tb_frame.f_code.co_filename == __file__ and own.tb_next is not None:
            own = own.tb_next
        return Failure("".join([*traceback.format_exception(type(error), error, own), *stray]))
    return Failure("\n".join(stray)) if stray else Success(value)


def _in_process_group(request: Request, connection: "Connection[Any, Any]", stray: list[str]) -> bytes:
    timeout = timedelta(seconds=request.group_timeout)
    server = "127.0.0.1", request.store_port
    store = dist.TCPStore(*server, is_master=False, timeout=timeout)  # type: ignore[attr-defined]
    if request.late_seed is not None:
        late_backend.register(request.late_seed)
    dist.init_process_group(
        "gloo" if request.late_seed is None else late_backend.NAME,
        store=dist.PrefixStore(request.group_name, store),  # type: ignore[attr-defined]
        rank=request.rank,
        world_size=request.world_size,
        timeout=timeout,
    )
    function, args = pickle.loads(request.call)
    value = _call(function, args)
    if stray:  # a failure, which is reported
        return value
    # Groups end when every rank is done: a rank that still connects fails if the other side has closed. So
    # the parent first collects all replies, and then sends "end".
    connection.send_bytes(pickle.dumps(Success(value)))
    connection.recv_bytes()
    # A rank that raised skips this: its process will be killed, and the other ranks may be stuck elsewhere.
    if dist.is_initialized():
        dist.destroy_process_group()
    return value


def _call(function: Callable[..., object], args: tuple[object, ...]) -> bytes:
    # Pickle sends the bytes of a tensor. The pickler of multiprocessing sends a handle to this process's
    # memory.
    return pickle.dumps(function(*args))


def _reset_state() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)


class _StrayExceptions:
    """Catches exceptions that Python only prints: those in destructors and in threads."""

    def __init__(self, found: list[str]) -> None:
        self._found = found

    def __enter__(self) -> None:
        self._hooks = sys.unraisablehook, threading.excepthook
        sys.unraisablehook = self._record
        threading.excepthook = self._record

    def __exit__(self, *_: object) -> None:
        sys.unraisablehook, threading.excepthook = self._hooks

    def _record(self, event: Any) -> None:
        self._found.append(
            "".join(traceback.format_exception(event.exc_type, event.exc_value, event.exc_traceback))
        )


def _loopback_interface() -> str:
    # Otherwise gloo looks up the host's name, which fails or is slow on machines without a network.
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


def _die_with_parent() -> None:
    """Ends this worker when the test run ends, whatever ends that."""
    # On Linux the kernel does this, even if this process hangs and holds Python's lock.
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # On other systems, or if the parent ended before that call, a thread waits for the parent's end.
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, name="follow-parent", daemon=True).start()
