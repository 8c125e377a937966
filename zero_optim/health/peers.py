"""Questions between watchdogs over TCP, which pass where a collective cannot.

Note [Dead, stopped or slow]
    Each watchdog listens on a port. If the connection is refused, the process has ended. If the kernel
    accepts but nobody answers, or the connection closes and another is accepted, the process is stopped or
    its host too busy. A question carries a token from the store. Messages are lines of JSON: a process that
    answers says at once what it does; what it first has to find out follows in a second line. The socket is
    bound to the interface that reaches the store.
"""

import errno
import json
import secrets
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from enum import Enum
from functools import partial
from typing import BinaryIO, NamedTuple, TypeVar

from zero_optim.compat.threads import start_thread_or_run
from zero_optim.health.tree import FAN, Message

Answer = Callable[[Message], Iterator[Message]]  # lines; the first comes at once
T = TypeVar("T")

ANSWER_LIMIT = 1.0  # seconds in which a process that runs answers
LONGEST_SEARCH = 30.0  # seconds in which a process that has answered says what it had to find out
_NO_WAY = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN)
_LONGEST = 2**20  # bytes of a line
_MOST_ASKING = 256  # connections whose question has not come; then the oldest is closed
_Selector = getattr(selectors, "PollSelector", selectors.SelectSelector)  # takes no file descriptor, as epoll


class Presence(Enum):
    """What is known of a process that does not answer."""

    ENDED = "has ended, or has dropped its optimizers: nothing listens at its address any more"
    NEVER = "has ended, and had built no optimizer and no DDP of zero_optim"
    SILENT = "does not answer: its process is stopped, its host too busy, or the link to it cut"
    UNCONNECTED = (
        "does not answer: no connection to it is made, as its host is too busy or the link to it cut"
    )
    CUT_OFF = "cannot be reached: there is no route to its host any more"
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
        self.socket = socket.create_server((host, 0), family=family, backlog=1024)
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

    def answer(self, answer: Answer) -> None:
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

    def _answer(self, connection: socket.socket, answer: Answer) -> None:
        with ExitStack() as stack, suppress(Exception):  # what strangers send must not end the watchdog
            stack.enter_context(connection)
            question = _message(self._asking.pop(connection))
            if secrets.compare_digest(str(question.pop("token", "")), self.address.token):
                lines = answer(question)
                connection.settimeout(ANSWER_LIMIT / 2)
                connection.sendall(_line(next(lines)))
                if has_second_line(question):
                    stack.pop_all()
                    start_thread_or_run(partial(_send, connection, lines), "zero_optim answer")
                else:
                    next(lines, None)

    def close(self) -> None:
        """Stop listening."""
        for each in (self.socket, self._receiver, self._sender, *self._asking):
            each.close()


def has_second_line(question: Message) -> bool:
    """Return whether the answer has two lines."""
    return "stop" in question or "complaint" in question


def longest_answer(questions: Iterable[Message]) -> float:
    """Return the seconds in which one of these questions is answered, or never."""
    return 3 * ANSWER_LIMIT + LONGEST_SEARCH * any(map(has_second_line, questions))


def _send(connection: socket.socket, lines: Iterator[Message]) -> None:
    with connection:
        for line in lines:
            with suppress(OSError):  # who asked has ended
                connection.sendall(_line(line))


def ask(address: Address, question: Message, patience: float = ANSWER_LIMIT) -> Message | Presence:
    """Ask another process, which has ``patience`` seconds to answer, and `LONGEST_SEARCH` for more."""
    is_loopback = address.host in ("127.0.0.1", "::1")
    if is_loopback and address.node != socket.gethostname():
        return Presence.UNKNOWN
    is_connected = False
    try:
        try:
            with _connected(address) as connection, connection.makefile("rb") as lines:
                is_connected = True
                connection.sendall(_line({**question, "token": address.token}))
                connection.settimeout(patience)
                answer = _read(lines)
                if has_second_line(question):
                    connection.settimeout(LONGEST_SEARCH)
                    with suppress(OSError, ValueError, EOFError):
                        answer |= _read(lines)
                return answer
        except (ConnectionResetError, BrokenPipeError, EOFError):  # closed, and perhaps the process lives
            _connected(address).close()
            return Presence.SILENT
    except TimeoutError:
        return Presence.SILENT if is_connected else Presence.UNCONNECTED
    except ConnectionError:
        return Presence.ENDED
    except (OSError, ValueError) as error:
        return Presence.CUT_OFF if getattr(error, "errno", None) in _NO_WAY else Presence.UNKNOWN


def _connected(address: Address) -> socket.socket:
    return socket.create_connection((address.host, address.port), ANSWER_LIMIT)


def in_threads(calls: Mapping[int, Callable[[], T]], limit: float) -> dict[int, T]:
    """Make calls in `FAN` threads; returns the results within ``limit`` seconds."""
    results: dict[int, T] = {}
    waiting = deque(calls)
    over = threading.Semaphore(0)

    def run() -> None:
        with suppress(IndexError):  # all have been made
            while True:
                number = waiting.popleft()
                with suppress(OSError, RuntimeError, ValueError, TypeError):  # the store is gone, say
                    results[number] = calls[number]()
                over.release()

    for _ in range(min(FAN, len(calls))):
        start_thread_or_run(run, "zero_optim question")
    deadline = time.monotonic() + limit
    for _ in calls:
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


def _read(lines: BinaryIO) -> Message:
    line = lines.readline(_LONGEST)
    if not line.endswith(b"\n"):
        raise EOFError("no whole line came")
    return _message(line)


def _message(content: bytes | bytearray) -> Message:
    message = json.loads(content)
    if not isinstance(message, dict):
        raise ValueError(f"expected an object, got {type(message).__name__}")  # noqa: TRY004 - as json.loads
    return message
