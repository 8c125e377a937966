"""The job of ``zero-optim train``: a small GPT trained on text with a sharded optimizer.

`config` holds the options, `prepare` checks them before any process starts, and each rank runs `worker` with
a `trainer`. Rank 0 also keeps a `metrics.RunLog`, which writes the run folder and the `display`.
"""
