"""Questions between watchdogs over TCP, which pass where a collective cannot.

Note [Dead, stopped or slow]
    Each watchdog listens on a port. If the connection is refused, the process has ended. If the kernel
    accepts but nobody answers, or the connection closes and another is accepted, the process is stopped or
    its host too busy. A question carries a token from the store. Messages are one line of JSON. The socket is
    bound to the interface that reaches the store.

Note [A store with a past]
    torchrun of PyTorch 2.13 starts processes again on the store of the former ones, with their addresses,
    ours and gloo's. A rank whose address does not answer may then be one that has built nothing yet.
"""

import errno
import json
import logging
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from zero_optim.compat.autograd import address_of_store, default_store
from zero_optim.compat.threads import start_thread_or_run

Message = dict[str, Any]  # plain JSON

T = TypeVar("T")

ANSWER_LIMIT = 1.0  # seconds in which a process that runs answers
_NO_WAY = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN)
_LONGEST = 2**20  # bytes of a line
_MOST_ASKING = 64  # connections whose question has not come; then the oldest is closed
_Selector = getattr(selectors, "PollSelector", selectors.SelectSelector)  # takes no file descriptor, as epoll


class Presence(Enum):
    """What is known of a process that does not answer."""

    ENDED = "has ended: nothing listens at its address any more"
    LEFT = "has let go of its optimizers, or has exited"
    NEVER = "has ended, and had built no optimizer and no DDP of zero_optim"
    SILENT = "does not answer: its process is stopped, its host too busy, or the link to it cut"
    CUT_OFF = "cannot be reached: there is no way to its host any more"
    ABSENT = "has built no optimizer and no DDP of zero_optim"
    UNKNOWN = "could not be asked"


class Address(NamedTuple):
    """The address of a watchdog, and the token for questions; in the store as JSON."""

    host: str
    port: int
    token: str
    node: str


class Listener:
    """Listens for questions of other ranks, at an address from `host_towards`."""

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.socket = socket.create_server((host, 0), family=family, backlog=128)
        self.socket.setblocking(False)
        self._asking: dict[socket.socket, bytearray] = {}  # connections, and what has come of each question
        self._receiver, self._sender = socket.socketpair()  # for `wake`
        for end in (self._receiver, self._sender):
            end.setblocking(False)
        port = self.socket.getsockname()[1]
        self.address = Address(host, port, secrets.token_hex(16), socket.gethostname())

    def wait(self, seconds: float) -> bool:
        """Wait for a question, a `wake`, or some seconds; True for a question."""
        with _Selector() as selector:
            for each in (self.socket, self._receiver, *self._asking):
                selector.register(each, selectors.EVENT_READ)
            ready = {key.fileobj for key, _ in selector.select(seconds)}
        if self._receiver in ready:
            self._receiver.recv(4096)
        return bool(ready - {self._receiver})

    def wake(self) -> None:
        """End a `wait`, from any thread, also during garbage collection."""
        with suppress(OSError):  # it has ended, or has been woken often enough
            self._sender.send(b"\0")

    def answer(self, answer: Callable[[Message], Message]) -> None:
        """Answer the questions that have come; does not wait for those that have not come whole."""
        with suppress(OSError):  # nobody more
            for _ in range(_MOST_ASKING):
                connection, _ = self.socket.accept()
                connection.setblocking(False)
                self._asking[connection] = bytearray()
        for connection in list(self._asking):
            if self._has_come(connection):
                self._answer(connection, answer)
        for connection in list(self._asking)[:-_MOST_ASKING]:
            self._asking.pop(connection)
            connection.close()

    def _has_come(self, connection: socket.socket) -> bool:
        """Return whether a question has come whole, or no more of it comes."""
        content = self._asking[connection]
        try:
            while (piece := connection.recv(65536)) and len(content) <= _LONGEST:
                content += piece
                if content.endswith(b"\n"):
                    break
        except BlockingIOError:
            return False
        except OSError:  # reset
            pass
        return True

    def _answer(self, connection: socket.socket, answer: Callable[[Message], Message]) -> None:
        # Whatever strangers send, it must not end the watchdog.
        with connection, suppress(Exception):
            question = _message(self._asking.pop(connection))
            if secrets.compare_digest(str(question.pop("token", "")), self.address.token):
                connection.settimeout(ANSWER_LIMIT / 2)
                connection.sendall(_line(answer(question)))

    def close(self) -> None:
        """Stop listening."""
        for each in (self.socket, self._receiver, self._sender, *self._asking):
            each.close()


def ask(address: Address, question: Message, patience: float = ANSWER_LIMIT) -> Message | Presence:
    """Ask another process, which has ``patience`` seconds to answer; takes at most `ANSWER_LIMIT` more."""
    is_loopback = address.host in ("127.0.0.1", "::1")
    if is_loopback and address.node != socket.gethostname():
        return Presence.UNKNOWN
    try:
        try:
            with _connected(address) as connection:
                connection.sendall(_line({**question, "token": address.token}))
                return _read(connection, patience)
        except (ConnectionResetError, BrokenPipeError, EOFError):  # closed, and perhaps the process lives
            _connected(address).close()
            return Presence.SILENT
    except TimeoutError:
        return Presence.SILENT
    except ConnectionError:
        return Presence.ENDED
    except (OSError, ValueError) as error:
        return Presence.CUT_OFF if getattr(error, "errno", None) in _NO_WAY else Presence.UNKNOWN


def _connected(address: Address) -> socket.socket:
    return socket.create_connection((address.host, address.port), ANSWER_LIMIT)


def in_threads(calls: Mapping[int, Callable[[], T]], limit: float) -> dict[int, T]:
    """Make calls in threads; returns the results within ``limit`` seconds."""
    results: dict[int, T] = {}
    over = threading.Semaphore(0)

    def run(numbers: Sequence[int]) -> None:
        for number in numbers:
            try:
                results[number] = calls[number]()
            except (OSError, RuntimeError, ValueError, TypeError):  # the store is gone, say: no result
                continue
            finally:
                over.release()

    numbers, most = list(calls), 32
    for start in range(min(most, len(numbers))):
        start_thread_or_run(partial(run, numbers[start::most]), "zero_optim question")
    deadline = time.monotonic() + limit
    for _ in numbers:
        if not over.acquire(timeout=max(0.0, deadline - time.monotonic())):
            break
    return dict(results)


def host_towards(host: str | None, port: int) -> str:
    """Return this machine's address towards another; loopback for None."""
    address = "127.0.0.1"
    with suppress(OSError):
        if host:  # nothing is sent: a datagram socket that is connected only chooses a route
            family, kind, _, _, where = socket.getaddrinfo(host, port or 1, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(where)
                address = probe.getsockname()[0]
    return address


def _line(message: Message) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _read(connection: socket.socket, limit: float) -> Message:
    """Read a line within ``limit`` seconds, or raise."""
    content, deadline = bytearray(), time.monotonic() + limit
    while not content.endswith(b"\n"):
        connection.settimeout(max(deadline - time.monotonic(), 0.001))  # 0 would be another error
        piece = connection.recv(65536)
        if not piece:
            raise EOFError("no whole line came")
        content += piece
        if len(content) > _LONGEST:
            raise ValueError(f"a line of more than {_LONGEST} bytes")
        if time.monotonic() > deadline:
            raise TimeoutError(f"no whole line came in {limit} s")
    return _message(content)


def _message(content: bytearray) -> Message:
    try:
        message = json.loads(content)
    except RecursionError as error:  # brackets in brackets, from somebody who is none of ours
        raise ValueError("a line of too many brackets") from error
    if not isinstance(message, dict):
        raise ValueError(f"expected an object, got {type(message).__name__}")  # noqa: TRY004 - see above
    return message


_LEFT = "left"  # in the store, in the place of an address
_WITH_A_PAST = (
    "the store of the process group has addresses of processes that have ended: this job was started again "
    "on the same store. gloo may connect to them, and then fails, or waits until its timeout: set "
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun"
)

logger = logging.getLogger("zero_optim")


class Directory:
    """The addresses of all watchdogs by global rank, from the store, to which it keeps no reference."""

    def __init__(self, is_current: Callable[[], bool]) -> None:
        self.rank = dist.get_rank()
        self.is_current = is_current
        self._addresses: dict[int, Address] = {}
        self._unsure: set[int] = set()  # ranks of which the store may have a former process's address

    @staticmethod
    def can_be_kept() -> bool:
        """Return whether the store takes entries, unlike a "fake" group's."""
        try:
            default_store().set("zero_optim/watchdog", "kept")
            return bool(default_store().get("zero_optim/watchdog") == b"kept")
        except RuntimeError:
            return False

    @staticmethod
    def own_host() -> str:
        """Return this machine's address for other ranks."""
        return host_towards(*address_of_store(default_store()))

    def publish(self, address: Address, *, is_first: bool) -> None:
        """Write this rank's address to the store; ``is_first``: this process has written none."""
        store, key = default_store(), _key(self.rank)
        if is_first and store.check([key]):  # Note [A store with a past]
            logger.warning(_WITH_A_PAST)
            self._unsure.update(range(dist.get_world_size()))
        self._addresses[self.rank] = address
        store.set(key, json.dumps(address))

    def leave(self) -> None:
        """Record that this rank has ended well."""
        with suppress(RuntimeError, ValueError):  # the store is gone, and so is whoever would ask
            store = default_store()
            if self.is_current():  # asked second: the store is not that of a default group made since
                store.set(_key(self.rank), _LEFT)

    def learn(self, ranks: Sequence[int]) -> None:
        """Read the ranks' addresses early: the store may end first. Waits for all ranks."""
        unknown = [rank for rank in ranks if rank not in self._addresses or rank in self._unsure]
        self._unsure.difference_update(ranks)
        if unknown:
            entries = default_store().multi_get([_key(rank) for rank in unknown])
            for rank, entry in zip(unknown, entries, strict=True):
                self._note(rank, entry.decode())

    def ask_all(
        self, ranks: Sequence[int], question: Message, patience: float = ANSWER_LIMIT
    ) -> dict[int, Message | Presence]:
        """Ask all other ranks, which have ``patience`` seconds; returns answers by index in ``ranks``."""
        others = {place: rank for place, rank in enumerate(ranks) if rank != self.rank}
        calls = {place: partial(self._ask_surely, rank, question, patience) for place, rank in others.items()}
        answers = in_threads(calls, 3 * ANSWER_LIMIT)
        return {place: answers.get(place, Presence.UNKNOWN) for place in others}

    def catch_up(self) -> None:
        """Wait until this rank's watchdog has answered earlier questions, which may bring a verdict."""
        if self.rank in self._addresses:
            ask(self._addresses[self.rank], {"ranks": []}, 5 * ANSWER_LIMIT)

    def _ask_surely(self, rank: int, question: Message, patience: float) -> Message | Presence:
        """Ask a rank; it is absent if the process that has ended may be a former one."""
        answer = self._ask(rank, question, patience)
        is_gone = answer in (Presence.ENDED, Presence.LEFT)
        return Presence.ABSENT if is_gone and rank in self._unsure else answer

    def _ask(self, rank: int, question: Message, patience: float) -> Message | Presence:
        if rank not in self._addresses and (absence := self._look_up(rank)) is not None:
            return absence
        address = self._addresses[rank]
        answer = ask(address, question, patience)
        if answer is not Presence.ENDED or "verdict" in question:  # not why: the store may be stopped
            return answer
        with suppress(RuntimeError, ValueError):  # the store may be gone as well
            if self._look_up(rank) is Presence.LEFT:
                return Presence.LEFT
            if self._addresses[rank] != address:  # it has begun to listen again
                return ask(self._addresses[rank], question, patience)
        return Presence.ENDED

    def _look_up(self, rank: int) -> Presence | None:
        """Read an address from the store; returns why there is none."""
        store = default_store()
        if not store.check([_key(rank)]):
            return Presence.ABSENT
        return self._note(rank, store.get(_key(rank)).decode())

    def _note(self, rank: int, entry: str) -> Presence | None:
        if entry == _LEFT:
            return Presence.LEFT
        self._addresses[rank] = Address(*json.loads(entry))
        return None


def _key(rank: int) -> str:
    return f"zero_optim/watchdog/{rank}"
