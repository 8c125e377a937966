"""The recipe for TensorBoard of docs/guide.md writes what `metrics()` returns."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from pool import on_ranks
from zero_optim import ZeroRedundancyOptimizer

PAGE = (Path(__file__).parents[2] / "docs" / "guide.md").read_text()
(RECIPE,) = re.findall(r"<!-- not run: needs TensorBoard -->\n```python\n(.*?)```", PAGE, re.DOTALL)


@on_ranks(2)
def test_tensorboard_gets_the_metrics_of_a_step(tmp_path: Path) -> None:
    model = nn.Linear(8, 8)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    if dist.get_rank():
        return
    expected = {f"zero_optim/{name}": value for name, value in optimizer.metrics(reset=False).items()}
    assert expected["zero_optim/sent_bytes/total"] > 0
    names: dict[str, Any] = {"optimizer": optimizer, "step": 7}
    before = Path.cwd()
    os.chdir(tmp_path)
    try:
        exec(RECIPE, names)
        names["writer"].close()  # the file of a relative path is written by a thread
    finally:
        os.chdir(before)
    (folder,) = (tmp_path / "runs").iterdir()
    events = EventAccumulator(str(folder)).Reload()
    scalars = {tag: events.Scalars(tag)[0] for tag in events.Tags()["scalars"]}
    assert {tag: scalar.value for tag, scalar in scalars.items()} == pytest.approx(expected)
    assert {scalar.step for scalar in scalars.values()} == {7}
