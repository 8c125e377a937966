"""The main job: a small GPT trained with its optimizer state sharded, on real text.

`config` has the options, and `prepare` checks them before any process starts. `elastic` launches the ranks.
Each of them runs `worker`, with a `trainer`, and on rank 0 a `run_log`, which uses `metrics` and `display`.
"""
