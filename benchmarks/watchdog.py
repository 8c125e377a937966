"""What the watchdog and the labels of collectives cost, as parts of a training step.

The watchdog's part is the CPU time of its thread over a run, as the system counts it, in parts of the time of
the run. The labels' part is the number of works of a step times what one costs on one thread: it is begun,
started and waited for with a handle that has nothing to do, less the same handle without a label. Target:
both together 0.5 %.
"""

import threading
import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from harness import arguments, launch, record, show
from models import workload

from zero_optim import ZeroRedundancyOptimizer
from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.works import Work
from zero_optim.ddp import DistributedDataParallel

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
            begun = group.begin_work("bucket 0 (layers.0.weight, …)")
            with begun.starting():
                pass
            Work(handle, group.phase, begun).wait()
        labelled = time.thread_time()
        for _ in range(REPEATS):
            with group.phase.held_up():
                handle.wait()
        taken.append((labelled - start - (time.thread_time() - labelled)) / REPEATS)
    return min(taken)


def measure(name: str, timeout: float | None, seconds: float) -> dict[str, Any]:
    """Train for some seconds, and give the parts; runs on each rank."""
    net, inputs, loss_of = workload(name)
    optimizer = ZeroRedundancyOptimizer(
        net.parameters(), torch.optim.AdamW, lr=1e-4, fused=True, timeout=timeout
    )
    model = DistributedDataParallel(net, timeout=timeout)
    generator = torch.Generator().manual_seed(dist.get_rank())

    def step() -> None:
        loss_of(model(inputs(generator))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(5):
        step()
    (watchdog,) = (each for each in threading.enumerate() if each.name == "zero_optim watchdog")
    assert watchdog.ident is not None
    clock = time.pthread_getcpuclockid(watchdog.ident)
    log, times = RankGroup.of(None).works.log, list[float]()
    start, cpu = time.perf_counter(), time.clock_gettime(clock)
    going = torch.ones(1)
    while going.item():
        log.ring.clear()
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
        works = len(log.ring)
        going.fill_(time.perf_counter() - start < seconds)
        dist.broadcast(going, 0)
    elapsed = time.perf_counter() - start
    label = seconds_of_a_label()
    return {
        "step": median(times),
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
                ]
            )
    columns = ("model", "timeout", "step, ms", "watchdog", "works a step", "a label, µs", "labels", "both")
    show("CPU time of the watchdog and of labels, in parts of a step, 2 ranks", columns, rows)
    record("watchdog", results, dry=options.dry)


if __name__ == "__main__":
    main()
