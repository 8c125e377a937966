"""What holds for any input: hypothesis looks for one where it does not, the same ones in every run."""

import json
import math
import tempfile
from collections import Counter, OrderedDict
from collections.abc import Iterator
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from drawn import draw_the_same
from training import assert_same_value
from zero_optim import CheckpointError
from zero_optim.checkpoint import manifest
from zero_optim.checkpoint.manifest import Chunk, DataFile, Entry, Manifest
from zero_optim.comm import encoding, wire
from zero_optim.plan.layout import whole
from zero_optim.plan.partition import assign_buckets, assign_owners
from zero_optim.plan.pieces import Piece
from zero_optim.state.moving import CutState

draw_the_same()

# ---------------------------------------------------------------------- partition

costs = st.one_of(st.integers(0, 10), st.integers(0, 10**12), st.floats(0, 1e12))
groups_of_costs = st.lists(st.lists(costs, max_size=12), max_size=5)


@given(groups_of_costs, st.integers(1, 9))
def test_owners_exist_and_loads_differ_by_no_more_than_one_item(groups: list[list[float]], size: int) -> None:
    owners = assign_owners(groups, size)
    assert [len(of_group) for of_group in owners] == [len(group) for group in groups]
    assert all(0 <= owner < size for of_group in owners for owner in of_group)
    flat = [Fraction(cost) for group in groups for cost in group]
    loads = [Fraction(0)] * size
    for cost, owner in zip(flat, (owner for of_group in owners for owner in of_group), strict=True):
        loads[owner] += cost
    rounding = Fraction(sum(flat)) / 10**12  # of the running sums that the assignment goes by
    assert max(loads) - min(loads) <= max(flat, default=0) + rounding


# ---------------------------------------------------------------------- layout

numels_and_owners = st.lists(st.tuples(st.integers(0, 70), st.integers(0, 5)), max_size=12)


@given(numels_and_owners, st.sampled_from([1, 2, 8, 16, 64]))
def test_a_layout_gives_every_element_one_aligned_place_in_its_owners_row(
    params: list[tuple[int, int]], alignment: int
) -> None:
    numels, owners = [numel for numel, _ in params], [owner for _, owner in params]
    layout = whole(numels, owners, alignment)
    places = [
        (extent.param, element)
        for row in layout.rows
        for extent in row.extents
        for element in range(extent.offset, extent.end)
    ]
    assert Counter(param for param, _ in places) == +Counter(dict(enumerate(numels)))
    assert len({element for _, element in places}) == len(places)
    for row in layout.rows:
        assert row.start % alignment == row.stop % alignment == 0
        assert all(owners[extent.param] == row.owner for extent in row.extents)
        assert all(extent.offset % alignment == 0 for extent in row.extents)
    assert layout.numel - sum(numels) < alignment * max(len(numels), 1)


# ---------------------------------------------------------------------- buckets


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 200)), max_size=30),
    st.lists(st.integers(1, 400), min_size=1, max_size=3),
    st.randoms(use_true_random=False),
)
def test_buckets_hold_every_parameter_once_in_the_order_asked_for(
    params: list[tuple[str, int]], caps: list[int], rng: Any
) -> None:
    keys, nbytes = [key for key, _ in params], [size for _, size in params]
    order = list(range(len(params)))
    rng.shuffle(order)
    buckets = assign_buckets(keys, nbytes, caps, order)
    assert all(buckets)
    for key in set(keys):
        of_key = [bucket for bucket in buckets if keys[bucket[0]] == key]
        assert [index for bucket in of_key for index in bucket] == [i for i in order if keys[i] == key]
        for number, bucket in enumerate(of_key):
            cap = caps[min(number, len(caps) - 1)]
            assert len(bucket) == 1 or sum(nbytes[index] for index in bucket[:-1]) < cap
    if min(caps) > sum(nbytes):
        assert len(buckets) == len(set(keys))


# ---------------------------------------------------------------------- wire format

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Tensors of any strides: 0-d and empty ones, sparse ones, and parts of others."""
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))) * 100
    tensor = numbers.to(draw(st.sampled_from(DTYPES)))
    if len(shape) > 1 and draw(st.booleans()):
        tensor = tensor.transpose(0, 1)
    if shape and draw(st.booleans()):
        tensor = tensor[::2]
    return tensor.to_sparse() if draw(st.booleans()) and tensor.dtype == torch.float32 and shape else tensor


plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.complex_numbers(allow_nan=False),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.sampled_from([torch.float16, torch.device("cpu"), torch.device("cuda", 1)]),
)
arrays = st.lists(st.floats(width=32, allow_nan=False), max_size=4).map(
    lambda n: np.array(n, dtype=np.float32)
)
keys_of_dicts = st.one_of(st.text(max_size=5), st.integers(-3, 3), st.none())
nested = st.recursive(
    st.one_of(plain, tensors(), arrays),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys_of_dicts, inner, max_size=4),
        st.dictionaries(keys_of_dicts, inner, max_size=4).map(OrderedDict),
        st.dictionaries(st.text(max_size=3), st.integers(), max_size=4).map(Counter),
    ),
    max_leaves=12,
)


@given(nested)
def test_a_nested_value_comes_back_as_it_was_sent(value: Any) -> None:
    skeleton, held = encoding.encode(value, "value")
    received = json.loads(json.dumps(skeleton))
    blanks = encoding.blank_tensors(received)
    for blank, tensor in zip(blanks, held, strict=True):
        wire.memory_of(blank).copy_(wire.memory_of(tensor))
    assert_same_value(encoding.decode(received, iter(blanks)), value)


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[Tensor, CutState]:
    """A dense tensor in any memory format, and pieces of it that rising ranks own."""
    shape = (draw(st.integers(2, 6)), *draw(st.lists(st.integers(1, 4), max_size=3)))
    order = draw(st.permutations(range(len(shape))))
    held = torch.arange(float(math.prod(shape))).view([shape[dim] for dim in order])
    tensor = held.permute([order.index(dim) for dim in range(len(shape))])
    edges = sorted(draw(st.sets(st.integers(1, shape[0] - 1), min_size=1)))
    bounds = list(pairwise([0, *edges, shape[0]]))
    owners = sorted(draw(st.sets(st.integers(0, 99), min_size=len(bounds), max_size=len(bounds))))
    pieces = tuple(Piece(owner, *rows) for owner, rows in zip(owners, bounds, strict=True))
    return tensor, CutState(shape, pieces, frozenset({"avg"}))


@given(cut_tensors(), st.data())
def test_joining_gives_back_the_state_that_rows_were_picked_from(
    made: tuple[Tensor, CutState], data: st.DataObject
) -> None:
    whole, cut = made
    here = data.draw(st.sampled_from(cut.pieces)).owner
    parts = {}
    for piece in cut.pieces:
        state = {"avg": whole, "step": torch.tensor(3.0), "count": torch.ones(1)}  # no row of the whole
        rows = cut.picked(state, Piece(0, 0, len(whole)), piece.start, piece.stop)
        assert set(cut.cut_entries(rows, piece)) == {"avg"}
        parts[piece.owner] = rows
        if piece.owner != here:  # as `wire.recv_encoded` does
            skeleton, held = encoding.encode(rows, "state")
            blanks = encoding.blank_tensors(skeleton)
            for blank, tensor in zip(blanks, held, strict=True):
                wire.memory_of(blank).copy_(wire.memory_of(tensor))
            parts[piece.owner] = encoding.decode(skeleton, iter(blanks))
    joined = cut.joined("parameter 7", parts)
    assert torch.equal(joined["avg"], whole)
    assert list(joined) == ["avg", "step", "count"]
    assert joined["step"] == 3
    assert joined["count"].shape == (1,)


# ---------------------------------------------------------------------- manifest

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
