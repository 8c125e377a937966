"""The watchdog's thread and sockets: there while it is needed, gone afterwards, and no false alarm."""

import copy
import gc
import json
import pickle
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from pool import Ranks, on_ranks
from processes import listening
from stalling import begun_works, linear, with_gradients
from waiting import LIMIT, wait_until
from zero_optim import ZeroRedundancyOptimizer, share_host_memory
from zero_optim.comm.backends import raised_by_backend
from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.work_log import WorkLog, explain_nothing
from zero_optim.comm.works import Work
from zero_optim.compat import private
from zero_optim.ddp import DistributedDataParallel
from zero_optim.errors import StalledError
from zero_optim.health import diagnosis as diagnosis_module
from zero_optim.health import peers
from zero_optim.health import verdicts as verdicts_module
from zero_optim.health.directory import Directory
from zero_optim.health.peers import Listener, Presence, ask
from zero_optim.health.tree import Message
from zero_optim.health.verdicts import Verdicts
from zero_optim.health.watchdog import Watchdog


def watchdogs() -> int:
    names = [thread.name for thread in threading.enumerate()]
    return sum(name.startswith("zero_optim") and name != "zero_optim host memory" for name in names)


def held() -> tuple[int, int, int]:
    """Threads of the watchdog, open file descriptors, and ports on which this process listens."""
    gc.collect()
    return watchdogs(), len(list(Path("/proc/self/fd").iterdir())), len(listening("self"))


@on_ranks(2)
def test_thread_port_and_descriptors_go_with_the_last_optimizer_and_ddp_or_the_default_group() -> None:
    alone = dist.new_subgroups(1)[0]
    share_host_memory()  # what the default group takes for that goes with it
    ZeroRedundancyOptimizer(linear().parameters(), torch.optim.SGD, lr=0.1)  # lets go of another test's group
    dist.barrier()
    gc.collect()
    wait_until(lambda: watchdogs() == 0)  # that of another test's garbage may be about to end
    before = held()
    for _ in range(3):
        model = with_gradients(linear())
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        wrapped = DistributedDataParallel(model)
        optimizer.step()
        assert watchdogs() == 1
        del optimizer, wrapped, model
        gc.collect()
        wait_until(lambda: held() == before)
        assert held() == before
    _optimizer = ZeroRedundancyOptimizer(linear().parameters(), torch.optim.SGD, process_group=alone, lr=0.1)
    assert watchdogs() == 0  # a group of one has none
    _other = ZeroRedundancyOptimizer(linear().parameters(), torch.optim.SGD, lr=0.1)
    assert watchdogs() == 1
    dist.destroy_process_group()  # it ends with the default group though the optimizer lives
    wait_until(lambda: watchdogs() == 0)
    assert watchdogs() == 0


@on_ranks(2)
def test_a_detached_optimizer_needs_no_watchdog_and_gets_one_when_it_is_bound() -> None:
    model = with_gradients(linear())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, timeout=50)
    wrapped = DistributedDataParallel(model)
    for _ in range(3):
        wrapped.detach()
        optimizer.detach()
        optimizer.rebind()  # the watchdog before may be about to end
        wrapped.rebind()
        with begun_works() as works:
            optimizer.step()
        log = optimizer.ranks.works.log
        assert log.explain is not explain_nothing
        assert optimizer.ranks.phase.timeout == 50
        assert {work.timeout for work in works if work.phase.name == "gather"} == {50}
    wrapped.detach()
    optimizer.detach()
    wait_until(lambda: watchdogs() == 0)
    assert watchdogs() == 0


@on_ranks(2)
def test_copies_and_pickles_keep_the_timeout() -> None:
    wait_until(lambda: watchdogs() == 0)  # that of another test's garbage may be about to end
    model = with_gradients(linear())
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, lr=0.1, timeout=50, on_stall="exit"
    )
    copied, pickled = copy.deepcopy(optimizer), pickle.dumps(optimizer)
    del optimizer
    gc.collect()
    for twin in (copied, pickle.loads(pickled)):
        assert watchdogs() == 1
        for param in twin.owners():
            param.grad = torch.ones_like(param)
        with begun_works() as works:
            twin.step()
            twin.consolidate_state_dict()
            twin.explain()
        assert {work.timeout for work in works} == {50}
        assert twin.core.inputs.options.on_stall == "exit"
    wrapped = DistributedDataParallel(linear(), timeout=60)
    for again in (copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped))):
        with begun_works() as works:
            again(torch.ones(2, 4)).sum().backward()
        assert {work.timeout for work in works} == {60}


@contextmanager
def patient_questions() -> Iterator[None]:
    """Have questions wait for as long as a busy machine takes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zero_optim.health.peers.ANSWER_LIMIT", LIMIT)
        yield


# ---------------------------------------------------------------------- questions


@pytest.fixture
def listener() -> Any:
    made = Listener("127.0.0.1")
    yield made
    made.close()


def test_who_does_not_have_the_token_is_not_answered(listener: Listener) -> None:
    answered: list[object] = []

    def answer(question: Message) -> Iterator[Message]:
        answered.append(question)
        yield {}

    def serve() -> None:
        wait_until(lambda: listener.wait(0.1))
        listener.answer(answer)

    server = threading.Thread(target=serve)
    server.start()
    known = listener.address
    stranger = known._replace(token="guess")
    with patient_questions():
        assert ask(stranger, {"verdict": ["end", []]}) is Presence.SILENT  # the connection is closed
    server.join()
    assert answered == []


class Dying:
    """Stands for the directory: rank 1 was killed, but the host takes a while to end its process."""

    rank = 0

    def __init__(self, answers: Sequence[Presence]) -> None:
        self.answers = iter(answers)
        self.catch_up: Callable[[], None] = lambda: None

    def is_current(self) -> bool:
        return True

    def ask_all(self, ranks: Sequence[int], question: Message) -> dict[int, Message | Presence]:
        return {} if "verdict" in question else {1: next(self.answers)}


def explain_closed(
    answers: Sequence[Presence], longest: float, raised: str = "Connection reset by peer"
) -> str | None:
    group = RankGroup.of(None)
    dying: Any = Dying(answers)
    verdicts = Verdicts(group.works.log, dying)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(diagnosis_module, "ANSWER_LIMIT", 0.0)  # each question takes longer than that
        patch.setattr(diagnosis_module, "_LONGEST_END", longest)
        works = group.works
        patch.setattr(works, "ranks", (0, 1))
        patch.setattr(works, "_can_cut", False)  # there is no rank 1
        error = verdicts.explain(group.begin_work(), RuntimeError(raised))
    return None if error is None else str(error)


def test_a_killed_rank_that_takes_long_to_end_is_named(ranks1: Ranks) -> None:
    slow = [Presence.SILENT, Presence.UNKNOWN, Presence.SILENT, Presence.ENDED]
    for raised in ("Connection reset by peer", "writev [127.0.0.1]:41: Broken pipe"):
        (said,) = ranks1.run(explain_closed, slow, LIMIT, raised)
        assert "rank 1 has ended" in str(said)
    (said,) = ranks1.run(explain_closed, [Presence.SILENT], 0.0)
    assert "rank 1 does not answer" in str(said)
    (said,) = ranks1.run(explain_closed, [Presence.UNKNOWN], 0.0)
    assert "a connection of rank 0 broke (Connection reset by peer); rank 1 could not be asked" in str(said)


def test_a_rank_whose_link_is_cut_is_named_whatever_the_backend_says(ranks1: Ranks) -> None:
    for raised in ("read [10.0.0.3]:41: No route to host", "Application timeout caused pair closure"):
        (said,) = ranks1.run(explain_closed, [Presence.CUT_OFF], 0.0, raised)
        assert "rank 1 cannot be reached" in str(said), raised


def test_what_gloo_raises_without_its_source_file_is_told_from_what_hooks_raise() -> None:
    assert raised_by_backend(RuntimeError("… RuntimeError: Application timeout caused pair closure"))
    assert not raised_by_backend(RuntimeError("timeout"))


def work_of(group: RankGroup, *, has_ended: bool = False, error: Exception | None = None) -> Work:
    """A work on a device, which may have ended, and failed; or of which asking raises an error."""
    handle = mock.Mock(spec=["exception", "is_completed", "wait"])
    handle.wait.side_effect = AssertionError("somebody waited")
    handle.exception.return_value = error
    handle.is_completed.return_value = has_ended
    handle.is_completed.side_effect = None if has_ended else error
    return Work(group.works, group.phase, late_on=torch.device("cpu")).take(handle)


@on_ranks(1)
def test_a_work_that_fails_while_nobody_waits_for_it_tells_which_rank_has_ended() -> None:
    group = RankGroup.of(None)
    watchdog = Watchdog(group.works.log, dist.group.WORLD)  # type: ignore[arg-type]
    watchdog._listener.close()
    dying: Any = Dying([Presence.SILENT, Presence.ENDED])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verdicts_module, "_beside", lambda work: work())
        patch.setattr(watchdog._verdicts, "_directory", dying)
        patch.setattr(group.works, "ranks", (0, 1))
        patch.setattr(group.works, "_can_cut", False)  # there is no rank 1
        lost = RuntimeError("remote process exited or there was a network error: connection closed")
        work = work_of(group, has_ended=True, error=lost)
        watchdog._look()
        with pytest.raises(StalledError) as caught:
            group.begin_work()
    assert group.works.has_failed
    assert str(work.exception()) == str(caught.value)
    assert "rank 1 has ended" in str(caught.value)


def test_where_nobody_answers_a_process_is_silent_and_where_nobody_listens_it_has_ended(
    listener: Listener,
) -> None:
    assert ask(listener.address, {}) is Presence.SILENT
    listener.close()
    assert ask(listener.address, {}) is Presence.ENDED


@pytest.mark.parametrize("line", [b"no json\n", b"[1]\n", b"", b'{"token": 3}\n', b"[" * 100_000 + b"\n"])
def test_what_is_no_question_is_dropped(listener: Listener, line: bytes) -> None:
    with socket.create_connection((listener.address.host, listener.address.port)) as connection:
        connection.sendall(line)
        connection.shutdown(socket.SHUT_WR)
        wait_until(lambda: listener.wait(0.1))
        listener.answer(lambda question: iter([{"answered": True}]))
        assert connection.recv(100) == b""


def test_no_question_ends_the_watchdog(listener: Listener) -> None:
    """`int(Infinity)` raises OverflowError."""
    verdicts = Verdicts(WorkLog(), Directory.__new__(Directory))
    with socket.create_connection(listener.address[:2]) as connection:
        question = {"ranks": [float("inf")], "token": listener.address.token}
        connection.sendall(json.dumps(question).encode() + b"\n")
        wait_until(lambda: listener.wait(0.1))
        listener.answer(verdicts.answer)
        assert connection.recv(100) == b""


def test_a_question_that_comes_late_or_behind_idle_connections_is_answered(listener: Listener) -> None:
    known = listener.address
    question = json.dumps({"token": known.token}).encode() + b"\n"
    with ExitStack() as connections:
        late, *_, last = [
            connections.enter_context(socket.create_connection(known[:2])) for _ in range(peers._MOST_ASKING)
        ]
        for asking in (last, late):
            wait_until(lambda: listener.wait(0.1))
            listener.answer(lambda question: pytest.fail("nobody has asked"))
            asking.sendall(question)
            wait_until(lambda: listener.wait(0.1))
            listener.answer(lambda question: iter([{"answered": True}]))
            assert asking.recv(100) == b'{"answered": true}\n'
            connections.enter_context(socket.create_connection(known[:2]))


def test_a_watchdog_lives_whose_connection_closes(listener: Listener) -> None:
    """It may have waited too long for the question; the next connection shows that it lives."""
    server = threading.Thread(target=lambda: (wait_until(lambda: listener.wait(0.1)), close_first()))

    def close_first() -> None:
        connection, _ = listener.socket.accept()
        connection.close()

    server.start()
    with patient_questions():
        assert ask(listener.address, {}) is Presence.SILENT
    server.join()


def test_a_store_that_forgets_what_it_takes_holds_no_addresses() -> None:
    """As that of a "fake" group of PyTorch 2.14, which answers an empty string."""
    store = mock.Mock()
    store.get.return_value = b""
    with mock.patch.object(private, "get_default_store", return_value=store):
        assert not Directory.can_be_kept()


def test_who_sends_a_question_slowly_does_not_hold_the_watchdog_up(listener: Listener) -> None:
    over = threading.Event()
    timer = threading.Timer(LIMIT, over.set)
    timer.start()
    with socket.create_connection((listener.address.host, listener.address.port)) as connection:

        def drip() -> None:
            with suppress(OSError):
                while not over.wait(0.01):
                    connection.send(b"x")

        stranger = threading.Thread(target=drip)
        stranger.start()
        wait_until(lambda: listener.wait(0.1))
        listener.answer(lambda question: iter([{"answered": True}]))
        assert not over.is_set(), "it would have gone on"
        over.set()
        stranger.join()
    timer.cancel()
