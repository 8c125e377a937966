"""The GPU suite, ``make gpu``: every claim on CUDA, in one table; on the CPU too, to prove the suite.

Note [The GPU suite]
    A case is a function of a `Here`, which has the device. It raises if a claim does not hold, `NotHere` if
    it cannot be tried, and returns figures for the table. The same cases run on the CPU over gloo
    (``--device cpu``), without sleeping kernels, counts of synchronizations and memory.

    Ranks come from ``pool``. Its processes begin in a gloo group; for NCCL a case's group takes that one's
    place. Two ranks over gloo share one card, which NCCL refuses: so NCCL runs with one rank, and with two
    where there are two cards. Three and four ranks over gloo show the order of sums.

    Most claims have no case of their own: `gpu.cases` lists functions of the CPU's tests, which run on the
    device as they are. No file here is collected by pytest; ``tests/test_gpu_suite.py`` runs the cases.
"""
