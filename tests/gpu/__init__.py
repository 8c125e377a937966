"""The GPU suite, ``make gpu``: every claim on CUDA, in one table; on the CPU too, to prove the suite.

Note [The GPU suite]
    A case is a function of a `Here`, which has the device. It raises if a claim does not hold, `NotHere` if
    it cannot be tried, and returns figures for the table. The same cases run on the CPU over gloo
    (``--device cpu``): then what only an accelerator has (sleeping kernels, counts of synchronizations,
    memory) is left out, and the rest of each case runs as it is. So the suite cannot rot where nobody has a
    GPU.

    Ranks come from ``pool``, as in the other tests. Its processes begin in a gloo group; for NCCL a case's
    group takes that one's place. Two ranks over gloo share one card, which NCCL refuses: so NCCL runs with
    one rank, and with two where there are two cards. Three and four ranks over gloo show the order of sums.

    Much of what the CPU's suite proves needs no case of its own: `gpu.cpu_tests` lists functions of its
    tests, which run on the device as they are. On the CPU they run the library's code for devices with
    streams.

    No file here is collected by pytest. ``tests/test_gpu_suite.py`` runs the cases on the CPU; the suite
    itself needs PyTorch, numpy and pytest (which helpers import), no network and no installed package.
"""
