"""What the watchdog, labels of collectives and the counts of `metrics()` cost, as parts of a training step.

The watchdog's part is the CPU time of its thread over a run, as the system counts it, in parts of the time of
the run. The labels' part is the number of works of a step times what one costs on one thread: it is begun,
started and waited for with a handle that has nothing to do, less the same handle without a label. Target:
both together 0.5 %.

The counts' part is the number of spans and of other counts of a step, each times what one costs on one
thread. Target: 0.5 % too.
"""

import threading
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from harness import arguments, launch, record, show
from models import workload

from zero_optim import ZeroRedundancyOptimizer
from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.traffic import Phase
from zero_optim.comm.works import Work
from zero_optim.ddp import DistributedDataParallel
from zero_optim.flow.pending import Waitable

MODELS = ("tiny", "gpt")
TARGET = 0.005
REPEATS = 20000


class Nothing:
    """The handle of a collective that is over."""

    def wait(self) -> bool:
        """Return at once."""
        return True


def seconds_of_a_label() -> float:
    """Time one work with its label, less the same without."""
    group, handle = RankGroup.of(None).during("reduce"), Nothing()
    taken = []
    for _ in range(3):
        start = time.thread_time()
        for _ in range(REPEATS):
            with group.begin_work("bucket 0 (layers.0.weight, …)") as work:
                work.take(handle)
            work.wait()
        labelled = time.thread_time()
        for _ in range(REPEATS):
            with group.phase:
                handle.wait()
        taken.append((labelled - start - (time.thread_time() - labelled)) / REPEATS)
    return min(taken)


def seconds_of_a_count() -> tuple[float, float]:
    """Time a span in which a caller is held up, and a count of bytes."""
    phase, spans, counts = Phase(), [], []
    for _ in range(3):
        start = time.thread_time()
        for _ in range(REPEATS):
            with phase:
                pass
        spanned = time.thread_time()
        for _ in range(REPEATS):
            phase.sent(1)
        counts.append((time.thread_time() - spanned) / REPEATS)
        spans.append((spanned - start) / REPEATS)
    return min(spans), min(counts)


def counts_of(step: Callable[[], None]) -> tuple[int, int, int]:
    """Take a step; tells how many spans it counts, how much else, and how many works begin."""
    found, end, sent, begin = [0, 0, 0], Phase.__exit__, Phase.sent, Work.take

    def ended(phase: Phase, *error: object) -> None:
        found[0] += 1
        end(phase, *error)

    def noted(phase: Phase, nbytes: int, collectives: int = 1) -> None:
        found[1] += 1
        sent(phase, nbytes, collectives)

    def begun(work: Work, *handles: Waitable) -> Work:
        found[2] += 1
        return begin(work, *handles)

    Phase.__exit__, Phase.sent, Work.take = ended, noted, begun  # type: ignore[method-assign, assignment]
    try:
        step()
    finally:
        Phase.__exit__, Phase.sent, Work.take = end, sent, begin  # type: ignore[method-assign]
    return found[0], found[1], found[2]


def measure(name: str, timeout: float | None, seconds: float) -> dict[str, Any]:
    """Train for some seconds, and give the parts; runs on each rank."""
    net, inputs, loss_of = workload(name)
    optimizer = ZeroRedundancyOptimizer(
        net.parameters(), torch.optim.AdamW, lr=1e-4, fused=True, timeout=timeout
    )
    model = DistributedDataParallel(net, timeout=timeout)
    generator = torch.Generator().manual_seed(dist.get_rank())

    def step() -> None:
        loss_of(model(inputs(generator))).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(5):
        step()
    (watchdog,) = (each for each in threading.enumerate() if each.name == "zero_optim watchdog")
    assert watchdog.ident is not None
    clock = time.pthread_getcpuclockid(watchdog.ident)
    times = list[float]()
    start, cpu = time.perf_counter(), time.clock_gettime(clock)
    going = torch.ones(1)
    while going.item():
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
        going.fill_(time.perf_counter() - start < seconds)
        dist.broadcast(going, 0)
    elapsed = time.perf_counter() - start
    label, (span, count) = seconds_of_a_label(), seconds_of_a_count()
    spans, counts, works = counts_of(step)
    return {
        "step": median(times),
        "spans": spans,
        "counts": counts,
        "metrics": (spans * span + counts * count) / median(times),
        "watchdog": (time.clock_gettime(clock) - cpu) / elapsed,
        "works": works,
        "label": label,
        "labels": works * label / median(times),
    }


def main() -> None:
    """Measure the models with the usual timeout, and with a short one."""
    parser = arguments(__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each run (10)")
    options = parser.parse_args()
    results, rows = [], []
    for name in MODELS:
        for timeout in (None, 1.0):
            told = launch(2, measure, name, timeout, options.seconds)
            worst = {key: max(each[key] for each in told) for key in told[0]}
            results.append({"model": name, "timeout": timeout, **worst})
            total = worst["watchdog"] + worst["labels"]
            rows.append(
                [
                    name,
                    "default" if timeout is None else f"{timeout:g} s",
                    f"{1e3 * worst['step']:.1f}",
                    f"{100 * worst['watchdog']:.3f} %",
                    worst["works"],
                    f"{1e6 * worst['label']:.1f}",
                    f"{100 * worst['labels']:.3f} %",
                    f"{100 * total:.3f} %{'' if total <= TARGET else ' (missed)'}",
                    f"{worst['spans']} + {worst['counts']}",
                    f"{100 * worst['metrics']:.3f} %{'' if worst['metrics'] <= TARGET else ' (missed)'}",
                ]
            )
    watched = ("watchdog", "works a step", "a label, µs", "labels", "both")
    columns = ("model", "timeout", "step, ms", *watched, "spans + counts a step", "metrics()")
    show("CPU time of the watchdog, of labels and of counts, in parts of a step, 2 ranks", columns, rows)
    record("watchdog", results, dry=options.dry)


if __name__ == "__main__":
    main()
