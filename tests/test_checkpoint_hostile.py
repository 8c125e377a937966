"""Damaged and hostile checkpoints: a clear error, nothing changed, and one bad folder hides no good one."""

import json
import os
import random
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from parity import assert_same
from pool import Pool, on_ranks
from test_checkpoint import Run, disturb
from zero_optim import CheckpointError, StateMismatchError, checkpoint, cli
from zero_optim.checkpoint import manifest
from zero_optim.checkpoint.data import CheckpointReader

MUTATIONS = 20


def save_two(folder: Path) -> None:
    for number in (1, 2):
        run = Run()
        run.train(number)
        run.save(folder / str(number))


def content_of(path: Path) -> Any:
    return json.loads((path / manifest.FILE).read_text().splitlines()[1])


def write(path: Path, body: str) -> None:
    """Write a manifest with this body and a right checksum."""
    head = {"format": manifest.FORMAT, "version": manifest.VERSION, "crc32": zlib.crc32(body.encode())}
    with suppress(ValueError, AttributeError, RecursionError):  # what is damaged further has no number
        head |= {"number": json.loads(body)["number"]} if "number" in json.loads(body) else {}
    (path / manifest.FILE).write_text(f"{json.dumps(head)}\n{body}\n")


def instead(make: Callable[[Path], object]) -> Callable[[Path], None]:
    """Make a damage: something else where the manifest was."""

    def damage(path: Path) -> None:
        (path / manifest.FILE).unlink()
        make(path / manifest.FILE)

    return damage


def huge(path: Path) -> None:
    with (path / manifest.FILE).open("r+b") as file:
        file.truncate(2**40)  # a hole, which takes no disk


def set_to(*place: Any, value: Any) -> Callable[[Path], None]:
    """Make a damage: another value at a place in the manifest, with a right checksum."""

    def damage(path: Path) -> None:
        content = content_of(path)
        inner = content
        for key in place[:-1]:
            inner = inner[key] if key != 0 or isinstance(inner, list) else next(iter(inner.values()))
        inner[place[-1]] = value
        write(path, json.dumps(content))

    return damage


DAMAGES = {
    "a FIFO": instead(os.mkfifo),
    "a link to a device": instead(lambda path: path.symlink_to("/dev/zero")),
    "a terabyte": huge,
    "a deep body": lambda path: write(path, "[" * 200_000 + "]" * 200_000),
    "a time out of range": set_to("time_ns", value=10**40),
    "no table": set_to("entries", value=[]),
    "a negative place": set_to("entries", 0, 2, 0, 3, value=-1),
    "a tensor without chunks": set_to("entries", 0, 2, value=[]),
}


@pytest.fixture(scope="module")
def saved_two(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    pool.run(1, save_two, folder)
    return folder


@pytest.fixture
def two(saved_two: Path, tmp_path: Path) -> Path:
    """Two checkpoints, "2" the newer."""
    shutil.copytree(saved_two, tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_checkpoint_is_refused_and_the_one_before_is_found(
    two: Path, damage: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    assert checkpoint.latest(two) == two / "2"
    damage(two / "2")
    for quick in (False, True):
        assert checkpoint.latest(two, quick=quick) == two / "1"
    for look in (checkpoint.peek, CheckpointReader):
        with pytest.raises(CheckpointError):
            look(two / "2")
    assert cli.main(["inspect", str(two / "2")]) == 1
    assert "complete    no: " in capsys.readouterr().out


# ---------------------------------------------------------------------- nothing changed


def held(run: Run) -> list[Any]:
    """Copy all that a load may change."""
    plain = {k: v for k, v in run.scheduler.state_dict().items() if k != "milestones"}
    options = [{k: v for k, v in g.items() if k != "params"} for g in run.optimizer.param_groups]
    state = [
        {k: v.clone() if isinstance(v, Tensor) else v for k, v in run.optimizer.state.get(p, {}).items()}
        for p in run.model.parameters()
    ]
    draws = [random.getstate(), torch.get_rng_state().clone()]
    return deepcopy([run.bits(), plain, run.scheduler.milestones, options, state, draws])


def mutated(content: Any, draw: random.Random) -> Any:
    """Change one place of a manifest's content to a value of another kind, or take it away."""
    content = deepcopy(content)
    section = draw.choice(["values", "values", "values", "entries", "files", "time_ns", "world_size"])
    places = list(_places(content, [section]))
    owner, key = draw.choice(places)
    if draw.random() < 0.3:
        del owner[key]
    else:
        owner[key] = draw.choice(
            [None, -1, 0.5, 10**30, "x", [], {}, ["plain", 1], True, [1, 2, 3], {"a": 1}]
        )
    return content


def _places(inner: Any, keys: Any) -> Iterator[tuple[Any, Any]]:
    for key in keys:
        yield inner, key
        child = inner[key]
        if isinstance(child, dict):
            yield from _places(child, list(child))
        elif isinstance(child, list):
            yield from _places(child, range(len(child)))


@on_ranks(2)
def test_a_load_that_raises_has_changed_nothing_whatever_the_manifest_says(tmp_path: Path) -> None:
    path, draw = tmp_path / "one", random.Random(5)
    run = Run()
    run.train(2)
    run.save(path)
    other = Run()
    other.train(1)
    refused = 0
    content = content_of(path)
    dist.barrier()
    for _ in range(MUTATIONS):
        body = json.dumps(mutated(content, draw))
        if dist.get_rank() == 0:
            write(path, body)
        dist.barrier()
        before = held(other)
        try:
            checkpoint.load(path, **other.parts())
        except (CheckpointError, StateMismatchError):
            refused += 1
            assert_same(held(other), before, body)
        dist.barrier()
    assert refused > MUTATIONS // 2


class Choosy(torch.optim.lr_scheduler.StepLR):
    """Takes over part of its state, and changes a rate, before it finds that something is missing."""

    def load_state_dict(self, state_dict: Any) -> None:
        self.last_epoch = 77
        self.optimizer.param_groups[0]["lr"] = 55.0
        state_dict["missing"]


class Picky(nn.Linear):
    """Refuses its extra state."""

    def get_extra_state(self) -> int:
        return 1

    def set_extra_state(self, state: int) -> None:
        if dist.get_rank() == 1:
            raise RuntimeError("not mine")


@on_ranks(2)
def test_a_load_that_fails_late_puts_back_what_it_changed_on_every_rank(tmp_path: Path) -> None:
    path = tmp_path / "one"
    run = Run(ema_decay=0.5)
    run.train(2)
    run.save(path)
    other = Run(ema_decay=0.5)
    disturb(other.model)
    other.train(1)
    other.scheduler = Choosy(other.optimizer, 3)  # type: ignore[assignment]
    other.scheduler.milestones = None  # type: ignore[assignment]
    before = held(other)
    with pytest.raises(
        StateMismatchError, match=r"the scheduler of the checkpoint does not fit: KeyError: 'missing'"
    ):
        other.load(path)
    assert_same(held(other), before)
    other.train(3)
    model = Picky(2, 2)
    checkpoint.save(path, model=model)
    disturb(model)
    with pytest.raises(
        StateMismatchError, match=r"the model's extra state of the checkpoint does not fit.*not mine"
    ):
        checkpoint.load(path, model=model)
    assert model.weight.unique().tolist() == [7]
    assert model.bias.unique().tolist() == [7]
