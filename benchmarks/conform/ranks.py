"""Each cell has ranks of its own: forked processes, which end with the cell, however that ends."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

from zero_optim.run.rank import end_with_parent, use_loopback

GRACE = 10.0  # seconds for the other rank after one has raised


@dataclass(frozen=True)
class Report:
    """How one rank ended: with a value, with an error, dead, or not at all."""

    kind: str  # "value", "error", "dead", "silent"
    value: Any = None
    text: str = ""


def run_on_ranks(size: int, limit: float, function: Callable[..., object], *args: object) -> list[Report]:
    """Run ``function(*args)`` on forked ranks of a gloo group, and kill those that are late.

    Args:
        size: number of ranks.
        limit: seconds for all. Collectives have two thirds of it.
        function: runs on each rank. Its value is pickled.
        *args: its arguments.
    """
    context = multiprocessing.get_context("fork")
    ports = [context.SimpleQueue() for _ in range(size)]  # rank 0 tells its port
    pipes, processes = [], []
    for rank in range(size):
        ours, theirs = context.Pipe()
        arguments = (rank, size, limit, theirs, ports, function, args)
        process = context.Process(target=_serve, args=arguments, daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        reports = _collect(pipes, processes, limit)
        for pipe in pipes:
            try:
                pipe.send("end")
            except OSError:
                continue
        return reports
    finally:
        for process in processes:
            process.join(0.2)
            process.kill()
            process.join()
            process.close()
        for pipe in pipes:
            pipe.close()


def _collect(
    pipes: "list[Connection[Any, Any]]", processes: Sequence[BaseProcess], limit: float
) -> list[Report]:
    reports = [Report("silent")] * len(pipes)
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    deadline = time.monotonic() + limit
    while waiting:
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                reports[rank] = pipe.recv()
            except (EOFError, OSError):
                processes[rank].join(GRACE)
                reports[rank] = Report("dead", text=f"exit code {processes[rank].exitcode}")
            if reports[rank].kind != "value":
                deadline = min(deadline, time.monotonic() + GRACE)
    return reports


def _serve(
    rank: int,
    size: int,
    limit: float,
    pipe: "Connection[Any, Any]",
    ports: "list[Any]",
    function: Callable[..., object],
    args: tuple[object, ...],
) -> None:
    end_with_parent(os.getppid())
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    if "CONFORMANCE_LOUD" not in os.environ:
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
    torch.set_num_threads(1)
    use_loopback()
    store = None
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        for queue in ports:
            queue.put(store.port)
    port = ports[rank].get()
    if store is None:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    try:
        timeout = timedelta(seconds=limit * 2 / 3)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
        report = Report("value", function(*args))
    except BaseException as error:  # noqa: BLE001 - what came is the result
        report = Report("error", type(error).__name__, str(error))
    pipe.send(report)
    pipe.recv()  # all have reported: no rank ends while another may still need it
    os._exit(0)
