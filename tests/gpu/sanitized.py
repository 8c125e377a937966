"""A process that trains under PyTorch's CUDA sanitizer; `gpu.costs` starts it.

The sanitizer is a dispatch mode, which counts for one thread. Autograd's threads take it over from the one
that calls them; the thread that steps is given it here.
"""

import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist

from gpu.costs import _pretend, _training
from gpu.setting import Here


def watch_all_threads() -> None:
    """Begin to watch the kernels of this thread, and of the threads that Python starts from now on."""
    from torch.cuda import _sanitizer

    _sanitizer.enable_cuda_sanitizer()
    run = threading.Thread.run

    def watched(thread: threading.Thread) -> None:
        with _sanitizer.cuda_sanitizer.dispatch:
            run(thread)

    threading.Thread.run = watched  # type: ignore[method-assign]


def main() -> None:
    name, backend, kind, world, path = sys.argv[1:]
    here = Here(torch.device(name), backend, Path(path).parent, Path(path))
    if here.is_cuda:
        watch_all_threads()
        torch.cuda.set_device(here.device)
    store = dist.FileStore(f"{path}-of-one", 1)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    if int(world) > 1:
        _pretend(here, int(world))
    iterate = _training(here, kind, clips=False)
    for _ in range(6):
        iterate()
    here.synchronize()
    dist.destroy_process_group()
    print("iterations done")  # noqa: T201 - the process that started this one looks for it


if __name__ == "__main__":
    main()
