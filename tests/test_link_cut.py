"""A link that is cut, or connections that break while all run: each survivor names the rank, or says that."""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDdp

from forked import fork_context
from stalling import linear, outcomes
from waiting import LIMIT
from zero_optim import StalledError, ZeroRedundancyOptimizer
from zero_optim.ddp import DistributedDataParallel, FullyShardedDataParallel
from zero_optim.hooks import zero_step

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
import link

SIZE, CUT = 3, 2


def train_until_it_fails(names: tuple[str, ...], interface: str, rank: int, result: Any) -> None:
    link.Link(names, interface, "1gbit").enter(rank)
    torch.set_num_threads(1)
    store = dist.TCPStore("10.77.0.1", 29500, SIZE, rank == 0)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=SIZE, timeout=timedelta(seconds=LIMIT))
    nets = [nn.Linear(64, 64) for _ in range(2)]
    limit = 16.0  # in half of which process groups are made, on a busy machine too
    optimizers = [ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, timeout=limit) for net in nets]
    models = [TorchDdp(nets[0]), DistributedDataParallel(nets[1], timeout=limit)]
    for model, optimizer in zip(models, optimizers, strict=True):
        model.register_comm_hook(None, zero_step(optimizer))  # type: ignore[no-untyped-call]
    try:
        for number in range(10**9):
            for model, optimizer in zip(models, optimizers, strict=True):
                model(torch.ones(2, 64)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            if number == 2:
                result.send("trains")
    except RuntimeError as error:
        result.send(f"{type(error).__name__}: {error}")
    result.recv()  # so that nobody sees a connection closed
    os._exit(0)


@contextmanager
def hosts() -> Iterator[Any]:
    """Three emulated hosts; skips where this process may not make them."""
    with ExitStack() as stack:
        try:
            emulated = stack.enter_context(link.emulated("1gbit", SIZE))
        except SystemExit as refused:
            pytest.skip(str(refused))
        yield emulated


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix" or shutil.which("tc") is None, reason="needs network namespaces")
def test_each_survivor_of_a_cut_link_names_the_rank_that_is_cut_off() -> None:
    context = fork_context()
    pipes = [context.Pipe() for _ in range(SIZE)]
    with hosts() as emulated:
        where = emulated.names, emulated.interface
        processes = [
            context.Process(target=train_until_it_fails, args=(*where, rank, pipe[1]))
            for rank, pipe in enumerate(pipes)
        ]
        try:
            for process in processes:
                process.start()
            for ours, _ in pipes:
                assert ours.poll(LIMIT)
                assert ours.recv() == "trains"
            switch = f"{emulated.names[0].rpartition('-')[0]}-switch"
            subprocess.run(["ip", "-n", switch, "link", "set", f"port{CUT}", "down"], check=True)
            for rank in {*range(SIZE)} - {CUT}:
                ours = pipes[rank][0]
                assert ours.poll(LIMIT), rank
                said = ours.recv()
                assert f"rank {CUT} does not answer" in said or f"rank {CUT} cannot be reached" in said, said
        finally:
            for process in processes:
                process.kill()
                process.join()


def open_sockets() -> set[int]:
    """The file descriptors of this process that are sockets."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # that of the folder
            if str(entry.readlink()).startswith("socket:"):
                found.add(int(entry.name))
    return found


def break_connections(descriptors: set[int]) -> None:
    """End connections as a host between the ranks may do, which both ends see."""
    for descriptor in descriptors:
        with socket.socket(fileno=os.dup(descriptor)) as copy, suppress(OSError):  # it may listen
            if copy.family != socket.AF_UNIX and copy.getpeername():
                copy.shutdown(socket.SHUT_RDWR)


def train_while_connections_break(kind: str) -> tuple[str, str]:
    before = open_sockets()
    group = dist.new_group()
    model = linear()
    optimizer = ZeroRedundancyOptimizer(
        model.named_parameters(), torch.optim.SGD, lr=0.1, process_group=group
    )
    if kind == "averaged":
        wrapped = DistributedDataParallel(model, process_group=group)
    else:
        wrapped = FullyShardedDataParallel(model, optimizer, units=[*model.children()])
    try:
        for number in range(4):
            if number == 2 and dist.get_rank() == 1:
                break_connections(open_sockets() - before)  # lanes are among them
            wrapped(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    except StalledError as error:
        return str(error), str(error.__cause__)
    return "trained", ""


@pytest.mark.on_sockets("connections break")
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs the files of a process")
@pytest.mark.parametrize("kind", ["averaged", "units"])
def test_connections_that_break_while_all_ranks_run_raise_a_named_error_on_each(kind: str) -> None:
    ended = outcomes(3, train_while_connections_break, kind)
    assert len({outcome.said[0] for outcome in ended}) == 1, ended
    for said, _ in (outcome.said for outcome in ended):
        assert "stalled: a connection of rank " in said, ended
        assert " broke ([" in said, ended
    assert any("gloo/" in outcome.said[1] for outcome in ended), ended
