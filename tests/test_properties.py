"""What holds for any input: hypothesis looks for one where it does not, the same ones in every run."""

import math
import tempfile
from collections.abc import Iterator
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st

from drawn import draw_the_same
from zero_optim import CheckpointError
from zero_optim.checkpoint import manifest
from zero_optim.checkpoint.manifest import Chunk, DataFile, Entry, Manifest
from zero_optim.plan.partition import RankLoads

draw_the_same()

# ---------------------------------------------------------------------- partition

costs = st.one_of(st.integers(0, 10), st.integers(0, 10**12), st.floats(0, 1e12))
groups_of_costs = st.lists(st.lists(costs, max_size=12), max_size=5)


@given(groups_of_costs, st.integers(1, 9))
def test_owners_exist_and_loads_differ_by_no_more_than_one_item(groups: list[list[float]], size: int) -> None:
    ranks = RankLoads([0] * size)
    owners = [ranks.assign(costs) for costs in groups]
    assert [len(of_group) for of_group in owners] == [len(group) for group in groups]
    assert all(0 <= owner < size for of_group in owners for owner in of_group)
    flat = [Fraction(cost) for group in groups for cost in group]
    loads = [Fraction(0)] * size
    for cost, owner in zip(flat, (owner for of_group in owners for owner in of_group), strict=True):
        loads[owner] += cost
    rounding = Fraction(sum(flat)) / 10**12  # of the running sums that the assignment goes by
    assert max(loads) - min(loads) <= max(flat, default=0) + rounding


# ---------------------------------------------------------------------- manifest

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]

json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
names_of_entries = st.text(min_size=1, max_size=8)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    """Entries of any dtype in boxes of any size, one behind the other in some files."""
    num_files = draw(st.integers(0, 3))
    names = [f"data-{draw(st.integers(0, 2**32)):x}-{number}.safetensors" for number in range(num_files)]
    heads = {name: draw(st.integers(0, 99)) for name in names}
    ends = dict(heads)

    def chunk(rows: tuple[int, int], nbytes: int) -> Chunk:
        name = draw(st.sampled_from(names))
        start = ends[name]
        ends[name] += nbytes
        return Chunk(rows, name, start, nbytes, draw(st.integers(0, 2**32 - 1)))

    def entry() -> Entry:
        dtype, shape = draw(st.sampled_from(DTYPES)), tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
        row = math.prod(shape[1:]) * dtype.itemsize
        if not shape:
            return Entry(dtype, (), (chunk((0, 1), row),))
        cuts = [0, *sorted(draw(st.lists(st.integers(0, shape[0]), max_size=2))), shape[0]]
        return Entry(dtype, shape, tuple(chunk(rows, (rows[1] - rows[0]) * row) for rows in pairwise(cuts)))

    entries = {name: entry() for name in draw(st.sets(names_of_entries, max_size=4)) if names}
    return Manifest(
        time_ns=draw(st.integers(0, 2**62)),
        world_size=draw(st.integers(1, 10**5)),
        software=draw(st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2)),
        files={
            name: DataFile(n, ends[name], heads[name], draw(st.integers(0, 2**32 - 1)))
            for n, name in enumerate(names)
        },
        entries=entries,
        values=draw(st.dictionaries(names_of_entries, json_values, max_size=3)),
        number=draw(st.integers(0, 10**6)),
    )


@given(manifests())
def test_a_manifest_comes_back_as_it_was_written(written: Manifest) -> None:
    assert Manifest.from_json(written.to_json()) == written
    for folder in folders():
        leave_files(folder, written)
        manifest.commit(folder, written)
        assert manifest.read(folder) == written


@given(manifests(), st.data())
def test_a_damaged_manifest_is_refused_or_says_the_same(written: Manifest, data: st.DataObject) -> None:
    content = written.to_json().encode()
    place = data.draw(st.integers(0, len(content) - 1))
    middle = data.draw(st.binary(max_size=3))
    removed = data.draw(st.sampled_from([0, 1, 2, len(content)]))
    for folder in folders():
        leave_files(folder, written)
        (folder / manifest.FILE).write_bytes(content[:place] + middle + content[place + removed :])
        try:
            found = manifest.read(folder)
        except CheckpointError:
            continue
        assert found == written  # such as after a blank more in the first line


def folders() -> Iterator[Path]:
    """One folder, for one example: pytest's would be shared by all."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def leave_files(folder: Path, written: Manifest) -> None:
    for name, file in written.files.items():
        with (folder / name).open("wb") as data:
            data.truncate(file.nbytes)
