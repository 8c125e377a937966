"""The Python of README.md and docs/ runs as it stands there, on two ranks.

The blocks of a section are one script. A block whose first line is a comment (``# FSDP2``) begins another,
and so does one after ``<!-- another script -->``; one after ``<!-- not run: REASON -->`` is left out. Readers
see no such lines. Names that a script reads before it sets them are those of `Names`.
"""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import test_migrating
from fully import Tower
from pool import on_ranks
from training import needs_muon
from worlds import leave
from zero_optim import ZeroRedundancyOptimizer, checkpoint
from zero_optim import ddp as wrappers
from zero_optim.hooks import zero_step

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
PARTS = re.compile(
    r"^#+ (?P<title>[^\n]+)$|^(?:<!-- (?P<marker>[^\n]+) -->\n)?```(?P<language>\w*)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
NOT_RUN = {
    "needs Lightning": 1, "needs transformers": 2, "needs accelerate": 2, "needs mmengine": 1, "needs Ray": 1,
    "needs timm": 1, "needs DeepSpeed": 1, "needs FairScale": 1, "needs CUDA": 1,
    "needs TensorBoard": 1, "needs W&B": 1,
}  # fmt: skip

# torch.distributed.checkpoint imports what PyTorch deprecates.
pytestmark = pytest.mark.filterwarnings("ignore", "error:::zero_optim")


class Script(NamedTuple):
    """Blocks of a page, at their lines."""

    page: str
    title: str  # of the section
    code: str


def blocks(page: Path) -> Iterator[tuple[str, int, str, str]]:
    """Gives section, line, marker and code of every block of Python."""
    title, text = "", page.read_text()
    for part in PARTS.finditer(text):
        title = part["title"] or title
        if part["language"] == "python":
            yield title, text.count("\n", 0, part.start("code")), part["marker"] or "", part["code"]


def scripts(page: Path) -> list[Script]:
    result = list[Script]()
    for title, line, marker, code in blocks(page):
        if marker.startswith("not run: "):
            continue
        apart = marker == "another script" or code.startswith("#")
        before = "" if apart or not result or result[-1].title != title else result.pop().code
        result.append(Script(page.name, title, before + "\n" * (line - before.count("\n")) + code))
    return result


def safetensors_with_file(_: object) -> Any:
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(8, 3, bias=False)])})
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
    model["layers"][0](torch.ones(4, 8)).sum().backward()  # type: ignore[index]
    optimizer.step()
    checkpoint.save("run/100", model=model, optimizer=optimizer)
    if dist.get_rank() == 0:
        (file,) = Path("run/100").glob("data-*-0.safetensors")
        file.rename("run/100/data-5f0c-0.safetensors")
    dist.barrier()
    return import_module("safetensors")


def file_of_state(names: "Names") -> Path:
    if dist.get_rank() == 0:
        torch.save(names["state_dict"], "state.pt")
    dist.barrier()
    return Path("state.pt")


class OfRank(torch.optim.AdamW):
    def __init__(self, params: Any, rank: int, **options: Any) -> None:
        assert rank == dist.get_rank()
        super().__init__(params, **options)


FACTORIES: dict[str, Callable[["Names"], Any]] = {
    "optimizer": lambda names: ZeroRedundancyOptimizer(names["params"], torch.optim.AdamW, lr=3e-4),
    "params": lambda names: list(names["model"].parameters()),
    "matrices": lambda names: [param for param in names["params"] if param.ndim == 2],
    "the_rest": lambda names: [param for param in names["params"] if param.ndim != 2],
    "state_dict": lambda names: torch.optim.AdamW(names["params"], lr=3e-4).state_dict(),
    "scheduler": lambda names: torch.optim.lr_scheduler.ConstantLR(names["optimizer"]),
    "ddp": lambda names: wrappers.DistributedDataParallel(names["model"]),
    "wrapped": lambda names: wrappers.FullyShardedDataParallel(names["model"], names["optimizer"]),
    "DistributedDataParallel": lambda _: wrappers.DistributedDataParallel,
    "FullyShardedDataParallel": lambda _: wrappers.FullyShardedDataParallel,
    "zero_step": lambda _: zero_step,
    "rank": lambda _: dist.get_rank(),
    "step": lambda _: 1,
    "dcp": lambda _: import_module("torch.distributed.checkpoint"),
    "device": lambda _: torch.device("cpu"),
    "init_device_mesh": lambda _: init_device_mesh,
    "num_machines": lambda _: 2,
    "ranks_of_each": lambda _: 1,
    "mesh": lambda _: init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")),
    "Transformer": lambda _: Tower,
    "MyClass": lambda _: OfRank,
    "folder": lambda _: "saved",
    "scratch": lambda names: names["path"],
    "is_asked_to_stop": lambda _: dist.get_rank() == 1,
    "safetensors": safetensors_with_file,
}
FACTORIES_FOR: dict[str, dict[str, Callable[["Names"], Any]]] = {  # a page or a section
    "README.md": {"path": lambda _: Path("optimizer.pt")},
    "rebinding.md": {"model": lambda _: wrappers.DistributedDataParallel(Tower())},
    "Checkpoints that you have": {"path": file_of_state},
}


class Names(dict[str, Any]):
    """The namespace of a script; makes what the text leaves open when it is read."""

    def __init__(self, script: Script, path: Path) -> None:
        first = script.code.strip().splitlines()[0].removeprefix("# ")
        is_left = first in test_migrating.LEFT
        super().__init__(
            test_migrating.names_of_others(first, path) if is_left else test_migrating.names(path)
        )
        self.factories = {
            **FACTORIES,
            **FACTORIES_FOR.get(script.page, {}),
            **FACTORIES_FOR.get(script.title, {}),
        }
        for name in self.factories.keys() & (set() if is_left else self.keys()):
            del self[name]

    def __missing__(self, name: str) -> Any:
        if name not in self.factories:
            raise KeyError(name)
        self[name] = self.factories[name](self)
        return self[name]


@contextmanager
def groups_anew(folder: Path) -> Iterator[None]:
    """Let init_process_group make a group of the same ranks, with a store of its own."""
    rank, init_process_group = dist.get_rank(), dist.init_process_group

    def anew(*_: object) -> None:
        if dist.is_initialized():
            leave()
        store = dist.FileStore(str(folder / "store"), 2)  # type: ignore[attr-defined]
        init_process_group("gloo", store=store, rank=rank, world_size=2)

    with mock.patch.object(dist, "init_process_group", anew):
        yield


def train(names: Names) -> None:
    """One more step with what a script has built."""
    model = next(names[name] for name in ("wrapped", "ddp", "model") if name in names)
    optimizer = names["optimizer"]
    model(
        torch.full((4, 8), 0.5)
    ).float().square().mean().backward()  # equal on all ranks: no wrapper averages
    optimizer.step()
    optimizer.zero_grad()


@on_ranks(2)
@pytest.mark.parametrize(
    "script",
    [
        pytest.param(each, id=f"{each.page}: {each.title}", marks=[needs_muon] if "Muon" in each.code else [])
        for page in PAGES
        for each in scripts(page)
    ],
)
def test_a_script_of_a_page_runs(script: Script, tmp_path: Path) -> None:
    before = Path.cwd()
    os.chdir(tmp_path)
    try:
        names = Names(script, tmp_path)
        with groups_anew(tmp_path):
            exec(compile(script.code, script.page, "exec"), names)
        if dist.is_initialized():
            train(names)
    finally:
        os.chdir(before)


def test_few_blocks_are_not_run() -> None:
    markers = Counter(marker for page in PAGES for *_, marker, _ in blocks(page))
    del markers[""], markers["another script"]
    assert markers == {f"not run: {reason}": count for reason, count in NOT_RUN.items()}
