"""The job of ``zero-optim train``: a small GPT trained on text with a sharded optimizer.

`config` has the options. `prepare` checks them before any process starts. `elastic` launches the ranks. Each
rank runs `worker` with a `trainer`, in the `loop`. Rank 0 also has a `run_log`, which uses `metrics` and
`display`.
"""
