"""What needs a process of its own: the sanitizer, an allocator, a launcher; `gpu.costs.apart` starts it.

The sanitizer is a dispatch mode, which counts for one thread. Autograd's threads take it over from the one
that calls them; the thread that steps is given it here.
"""

import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist

from gpu.costs import only_own_stamps, pretend, training
from gpu.setting import Here
from gpu.starting import launched
from zero_optim import launch


def watch_all_threads() -> None:
    """Begin to watch the kernels of this thread, and of the threads that Python starts from now on."""
    from torch.cuda import _sanitizer

    _sanitizer.enable_cuda_sanitizer()
    run = threading.Thread.run

    def watched(thread: threading.Thread) -> None:
        with _sanitizer.cuda_sanitizer.dispatch:
            run(thread)

    threading.Thread.run = watched  # type: ignore[method-assign]


def train(here: Here, kind: str, world: int, watched: bool) -> None:
    """Run some overlapped iterations."""
    if here.is_cuda:
        if watched:
            watch_all_threads()
        torch.cuda.set_device(here.device)
    store = dist.FileStore(str(here.store), 1)  # type: ignore[attr-defined]
    dist.init_process_group(here.backend, store=store, rank=0, world_size=1)
    if world > 1:
        pretend(world)
    iterate = training(here, kind, clips=False)
    with only_own_stamps():
        for _ in range(6):
            iterate()
        here.synchronize()
    dist.destroy_process_group()


def main() -> None:
    """Do the job that the arguments name, and say at the end that it is done."""
    name, backend, path, job, *arguments = sys.argv[1:]
    here = Here(torch.device(name), backend, Path(path).parent, Path(f"{path}-apart"))
    if job == "launch":
        number = int(arguments[0])
        assert launch(launched, number, here.device.type, backend=backend) == [True] * number
    else:
        train(here, arguments[0], int(arguments[1]), watched=job == "watch")
    print("job done")  # noqa: T201 - the process that started this one looks for it


if __name__ == "__main__":
    main()
