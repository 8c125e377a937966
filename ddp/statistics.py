"""Where the time of an iteration goes, measured in some iterations only."""

import time
from dataclasses import dataclass, field
from typing import Literal

import torch

Mark = Literal["forward", "backward", "reduction", "backward_end", "reduction_end"]

# name of a figure -> the marks it lies between
_SPANS: dict[str, tuple[Mark, Mark]] = {
    "forward_compute_time": ("forward", "backward"),
    "backward_compute_time": ("backward", "backward_end"),
    "backward_comm_time": ("reduction", "reduction_end"),
    "backward_compute_comm_overlap_time": ("reduction", "backward_end"),
}
# names under which PyTorch tells single marks, in ns of the wall clock
_TOLD: dict[str, Mark] = {
    "forward_compute_time_start": "forward",
    "backward_compute_time_start": "backward",
    "backward_compute_time_end": "backward_end",
    "backward_comm_time_start": "reduction",
    "backward_comm_time_end": "reduction_end",
}
ALWAYS = 10  # iterations at the beginning that are all measured


@dataclass(slots=True)
class Clock:
    """Takes the marks of sampled iterations: the first ten, then every ``rate``-th.

    On CUDA the marks are events in the current stream, read only when somebody asks.

    Attributes:
        on_cuda: whether gradients are on CUDA.
        rate: iterations between samples; 100 as in PyTorch.
        num_iterations: those begun.
        totals: sums of each figure in ns, over ``num_sampled`` iterations.
    """

    on_cuda: bool
    rate: int = 100
    num_iterations: int = 0
    num_sampled: int = 0
    totals: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_SPANS, 0))
    _marks: dict[Mark, "int | torch.cuda.Event"] = field(default_factory=dict)
    _open: dict[Mark, "int | torch.cuda.Event"] = field(default_factory=dict)
    _samples: bool = False

    def begin(self) -> None:
        """Begin an iteration: its forward pass comes next."""
        self._samples = self.num_iterations < ALWAYS or self.num_iterations % self.rate == 0
        self.num_iterations += 1
        self._open = {}
        self.mark("forward")

    def mark(self, mark: Mark) -> None:
        """Remember when something happened, the first time it does in this iteration."""
        if not self._samples or mark in self._open:
            return
        if self.on_cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._open[mark] = event
        else:
            self._open[mark] = time.time_ns()

    def end(self) -> None:
        """Close the iteration, if it was sampled whole."""
        if not self._samples:
            return
        self.mark("reduction_end")
        self._samples = False
        self._collect()
        self._marks = self._open

    def _collect(self) -> None:
        """Add the iteration before to the totals: by now its events have surely been recorded."""
        if len(self._marks) == len(_TOLD):
            self.num_sampled += 1
            for name, nanoseconds in self._spans().items():
                self.totals[name] += nanoseconds
        self._marks = {}

    def _spans(self) -> dict[str, int]:
        return {name: _between(self._marks[a], self._marks[b]) for name, (a, b) in _SPANS.items()}

    def figures(self) -> dict[str, int]:
        """Tell the last sampled iteration and the averages, in ns; empty before the first one."""
        if len(self._marks) < len(_TOLD):
            return {}
        last = self._spans()
        number = self.num_sampled + 1
        averages = {f"avg_{name}": (self.totals[name] + last[name]) // number for name in last}
        marks = {name: self._marks[mark] for name, mark in _TOLD.items()}
        times = {name: mark for name, mark in marks.items() if isinstance(mark, int)}
        return {**last, **averages, **times}


def _between(start: "int | torch.cuda.Event", end: "int | torch.cuda.Event") -> int:
    """Nanoseconds from one mark to another, at least 0."""
    if isinstance(start, int) and isinstance(end, int):
        return max(0, end - start)
    assert not isinstance(start, int)
    assert not isinstance(end, int)
    end.synchronize()
    return max(0, int(start.elapsed_time(end) * 1e6))
