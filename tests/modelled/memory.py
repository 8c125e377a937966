"""Memory: who wrote each byte last, who has read it since, and what may be used again.

Note [Addresses]
    Two tensors may have storages of their own over the same memory: those that DLPack makes. So memory is
    known by its address. An operator touches the runs of bytes that its tensors have elements in, so the
    places of a bucket do not disturb each other.
"""

import sys
import sysconfig
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Literal

import torch
from torch import Tensor

import zero_optim
from modelled.clocks import Clock, Stream, Timeline

Kind = Literal["device", "host", "pinned"]
_MOST_RUNS = 256  # of one tensor; one with more counts as everything between its first and last element
_PACKAGE = str(Path(zero_optim.__file__).parent)  # shown, though a wheel lies among packages
_NOT_SHOWN = (  # in stacks
    str(Path(__file__).parent),
    "<",
    *{sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")},
)


@cache  # every operator looks at all frames
def _is_shown(filename: str) -> bool:
    return filename.startswith(_PACKAGE) or not filename.startswith(_NOT_SHOWN)


@dataclass(frozen=True, slots=True)
class Stack:
    """The functions that called, outermost first, without those of Python, other packages and this model."""

    frames: tuple[tuple[CodeType, int], ...]

    @classmethod
    def here(cls) -> "Stack":
        frames: list[tuple[CodeType, int]] = []
        frame = sys._getframe(1)
        while frame is not None:
            if _is_shown(frame.f_code.co_filename):
                frames.append((frame.f_code, frame.f_lineno))
            frame = frame.f_back  # type: ignore[assignment]
        return cls(tuple(reversed(frames)))

    @property
    def functions(self) -> tuple[str, ...]:
        return tuple(code.co_name for code, _ in self.frames)

    def __str__(self) -> str:
        shown = [(Path(code.co_filename).name, line, code.co_name) for code, line in self.frames[-8:]]
        return "\n".join(f"      {name}:{line} in {function}" for name, line, function in shown)


@dataclass(frozen=True, slots=True)
class Access:
    """One use of some memory."""

    what: str  # the operator or collective
    writes: bool
    by: Timeline
    tick: int  # when, in that timeline
    stack: Stack

    def ended_before(self, clock: Clock) -> bool:
        return clock.get(self.by.number, 0) >= self.tick

    def __str__(self) -> str:
        return f"{'write' if self.writes else 'read'} by {self.what} on {self.by.name}, from\n{self.stack}"


@dataclass(frozen=True, slots=True)
class Race:
    """Two uses that no event orders, the first as it was asked for first; and what is wrong."""

    what: str
    first: Access
    second: Access

    def __str__(self) -> str:
        return f"{self.what}\n    {self.first}\n    and {self.second}"


@dataclass(slots=True)
class Segment:
    """Bytes that had the same uses: ``[start, stop)``; ``reads`` by timeline, since the last write."""

    start: int
    stop: int
    write: Access | None = None
    reads: dict[int, Access] = field(default_factory=dict)

    def uses(self) -> Iterator[Access]:
        yield from self.reads.values()
        if self.write is not None:
            yield self.write


class Block:
    """What was allocated at once."""

    def __init__(
        self, start: int, stop: int, owner: Stream, made: Access | None, storage: "weakref.ref[object]"
    ) -> None:
        self.start, self.stop = start, stop
        self.owner = owner  # the stream it was allocated on, to which it returns
        self.kind: Kind = "device"
        self.users: set[Stream] = set()  # that `record_use` named
        self.is_emptied = False  # it was given back before its storage was gone
        self.storage = storage
        self.segments = [Segment(start, stop, made)]

    def become(self, kind: Kind) -> None:
        """Be of another kind, without uses so far."""
        self.kind = kind
        self.segments = [Segment(self.start, self.stop)]

    def at(self, start: int, stop: int) -> Iterator[Segment]:
        """Give the segments between two addresses, cut there."""
        self._cut(start)
        self._cut(stop)
        for segment in self.segments[self._place(start) :]:
            if segment.start >= stop:
                return
            yield segment

    def _place(self, address: int) -> int:
        return max(0, bisect_right(self.segments, address, key=lambda segment: segment.start) - 1)

    def _cut(self, address: int) -> None:
        place = self._place(address)
        found = self.segments[place]
        if found.start < address < found.stop:
            after = Segment(address, found.stop, found.write, dict(found.reads))
            found.stop = address
            self.segments.insert(place + 1, after)


class Memory:
    """All blocks that are in use; ``report`` is called with each race."""

    def __init__(self, report: Callable[[Race], None]) -> None:
        self._report = report
        self._starts: list[int] = []
        self._blocks: dict[int, Block] = {}
        self._known: dict[int, tuple[weakref.ref[object], Block]] = {}  # by the address of a StorageImpl
        self._freed: deque[tuple[Block, Stack]] = deque()
        self._free: dict[Stream, list[tuple[Block, Stack]]] = {}  # of streams that get memory in order

    def block_of(
        self, tensor: Tensor, owner: Stream, allocated: Callable[[], Access] | None = None
    ) -> tuple[Block, bool]:
        """Find where a tensor, not empty, lies, and whether it was unknown.

        If so, it was allocated on ``owner``, by what ``allocated`` returns, or else before the model.
        """
        self.collect()
        storage = tensor.untyped_storage()
        known = self._known.get(storage._cdata)
        if (
            known is not None
            and known[0]() is storage
            and known[1].start <= storage.data_ptr() < known[1].stop
        ):
            return known[1], False
        start = storage.data_ptr()
        stop = start + storage.nbytes()
        block, is_new = self._over(start, stop), False
        if block is None:
            made = None if allocated is None else allocated()
            if made is not None:
                self._check_free(owner)
            block, is_new = self._add(storage, start, stop, owner, made), True
        self._known[storage._cdata] = weakref.ref(storage, self._forgetting(storage._cdata)), block
        return block, is_new

    def _over(self, start: int, stop: int) -> Block | None:
        """Find the block, still in use, that holds some addresses; drop those that must be gone."""
        place = bisect_right(self._starts, start) - 1
        if place >= 0:
            block = self._blocks[self._starts[place]]
            if stop <= block.stop and block.storage() is not None:
                return block
        for address in [a for a in self._starts if a < stop and self._blocks[a].stop > start]:
            self._drop(self._blocks[address])
        return None

    def _add(
        self, storage: torch.UntypedStorage, start: int, stop: int, owner: Stream, made: Access | None
    ) -> Block:
        freed = self._freed

        def free(_: object) -> None:
            # May run anywhere, even while this thread holds the lock; `collect` does the rest.
            freed.append((block, Stack.here()))

        block = Block(start, stop, owner, made, weakref.ref(storage, free))
        self._starts.insert(bisect_right(self._starts, start), start)
        self._blocks[start] = block
        return block

    def _forgetting(self, key: int) -> Callable[[object], None]:
        known = self._known

        def forget(reference: object) -> None:
            found = known.get(key)
            if found is not None and found[0] is reference:
                del known[key]

        return forget

    def _drop(self, block: Block) -> None:
        if self._blocks.get(block.start) is block:
            del self._blocks[block.start]
            self._starts.remove(block.start)

    def collect(self) -> None:
        """See to what was freed since."""
        while self._freed:
            block, stack = self._freed.popleft()
            if not block.is_emptied:
                self._give_back(block, stack)

    def empty(self, storage: torch.UntypedStorage) -> None:
        """See to the memory of a storage that is emptied; it may get other memory later."""
        self.collect()
        known = self._known.pop(storage._cdata, None)
        if known is not None and known[0]() is storage and known[1].storage() is storage:
            known[1].is_emptied = True
            self._give_back(known[1], Stack.here())

    def _give_back(self, block: Block, stack: Stack) -> None:
        self._drop(block)
        if block.owner.gets_memory_in_order:
            self._free.setdefault(block.owner, []).append((block, stack))
        else:
            self._check_reuse(block, stack)

    def _check_free(self, owner: Stream) -> None:
        """See to memory that may be handed out now."""
        for block, stack in self._free.pop(owner, ()):
            self._check_reuse(block, stack)

    def _check_reuse(self, block: Block, stack: Stack) -> None:
        """Freed memory may be used again at once, by work of the stream that it was allocated on.

        That of `record_use` is kept until each stream named has done its work so far. Memory of the host is
        kept until copies have ended.
        """
        if block.kind != "device":
            return
        allowed: Clock = dict(block.owner.clock)
        for stream in block.users:
            for number, tick in stream.clock.items():
                allowed[number] = max(tick, allowed.get(number, 0))
        freeing = Access(
            "being freed", True, block.owner, block.owner.clock.get(block.owner.number, 0), stack
        )
        for segment in block.segments:
            for use in segment.uses():
                if not use.ended_before(allowed):
                    self._report(Race("memory may be used again while it is in use:", use, freeing))
                    return

    def touch(self, block: Block, runs: Sequence[tuple[int, int]], access: Access, clock: Clock) -> None:
        """Check a use of some addresses against those before it, and note it.

        ``clock``: what had ended when it began.
        """
        for start, stop in runs:
            for segment in block.at(start, stop):
                before = segment.uses() if access.writes else iter([segment.write] if segment.write else [])
                unordered = next((use for use in before if not use.ended_before(clock)), None)
                if unordered is not None:
                    self._report(Race(_said(unordered, access), unordered, access))
                if access.writes:
                    segment.write, segment.reads = access, {}
                else:
                    segment.reads[access.by.number] = access


def _said(first: Access, second: Access) -> str:
    if second.writes:
        return f"memory is written while a {'write' if first.writes else 'read'} may be under way:"
    return "memory is read while a write may be under way:"


def runs_of(tensor: Tensor) -> list[tuple[int, int]]:
    """List the runs of bytes, as addresses ``[start, stop)``, that a strided tensor has elements in."""
    size, start = tensor.element_size(), tensor.data_ptr()
    dims = sorted(
        (stride, extent) for stride, extent in zip(tensor.stride(), tensor.shape, strict=True) if extent > 1
    )
    length = 1
    while dims and dims[0][0] <= length:  # neighbours, or an expanded dimension
        stride, extent = dims.pop(0)
        length = max(length, stride * (extent - 1) + length)
    offsets = [0]
    for stride, extent in dims:
        if len(offsets) * extent > _MOST_RUNS:
            whole = sum(stride * (extent - 1) for stride, extent in dims) + length
            return [(start, start + whole * size)]
        offsets = [offset + stride * index for offset in offsets for index in range(extent)]
    return [(start + offset * size, start + (offset + length) * size) for offset in offsets]
