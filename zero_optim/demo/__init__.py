"""The main job: a small GPT trained with its optimizer state sharded, on real text.

`config` says what is asked for, `prepare` checks it before any process starts, `launch` starts the
ranks, `worker` is what each of them runs: a `trainer`, and on rank 0 a `report` and `records`.
"""
