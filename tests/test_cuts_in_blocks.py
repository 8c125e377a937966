"""Classes that work in blocks of elements: a weight is cut only where its rows, or the like, were tried."""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any

import pytest
import torch

from own_classes import InBlocks, Quantized, RoundsLarge
from pool import on_ranks
from training import make_params, train_both, twin
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.probe.comparison import same
from zero_optim.probe.cut_rows import CutRows, like_rows, why_not_cut, why_rows_not_cut
from zero_optim.probe.probe import probe

# What torchao's classes trained otherwise where it was cut: blocks of 256 fill them, and they are long.
SHAPES = ((512, 80), (5025, 384), (3001, 640), (4001, 128))
BLOCKS = [{}, {"wraps": False}, {"block": 128, "wraps": False}, {"block": 2048}]


# ------------------------------------------------------------------ whole runs


def num_pieces_trained(shapes: Sequence[tuple[int, ...]], options: dict[str, Any]) -> list[int]:
    """Train as without sharding, and give the number of pieces of each parameter."""
    params = make_params(shapes)
    plain = Quantized(params, **options)
    sharded = ZeroRedundancyOptimizer(twin(params), Quantized, **options)
    train_both(plain, sharded, 4)
    return [len(pieces) for pieces in sharded.pieces().values()]


@on_ranks(2)
@pytest.mark.parametrize("options", BLOCKS, ids=str)
def test_state_in_blocks_trains_as_without_sharding(options: dict[str, Any]) -> None:
    for shape in SHAPES:
        assert num_pieces_trained([shape, (33, 7)], options) == [1, 1], shape


# Their sizes fit no tensor of a trial, but those that are cut.
ODD = [{"block": 1000, "least": 60_000}, {"block": 256, "least": 100_000}, {"block": 125, "least": 125_000}]


@on_ranks(2)
@pytest.mark.parametrize("options", ODD, ids=str)
def test_blocks_and_thresholds_of_any_size_are_seen_where_the_very_rows_are_tried(
    options: dict[str, Any],
) -> None:
    options = {**options, "wraps": False}
    assert why_not_cut(Quantized, options) is None
    assert num_pieces_trained([(1000, 160), (33, 7)], options) == [1, 1]
    # Of blocks that its rows do not fill, none is ever made.
    assert max(num_pieces_trained([(1001, 161), (33, 7)], options)) == 2


@on_ranks(2)
def test_explain_tells_why_rows_are_not_shared() -> None:
    params = make_params(((1000, 160),))
    build = partial(Quantized, least=100_000, wraps=False)
    (line,) = ZeroRedundancyOptimizer(params, build).explain(quiet=True).cuts
    assert "with rows of (1000, 160) cut at" in line


@on_ranks(2)
def test_what_is_cut_instead_of_another_is_tried_too() -> None:
    """The first fills blocks and stays whole; so the second is cut elsewhere, and is tried there too."""
    options = {"block": 1000, "least": 60_000, "wraps": False}
    assert num_pieces_trained([(1000, 160), (1001, 161), (501, 161)], options)[:2] == [1, 2]


# ------------------------------------------------------------------ the trials


@pytest.mark.parametrize("options", BLOCKS, ids=str)
def test_a_class_that_works_in_blocks_bears_no_cuts(options: dict[str, Any]) -> None:
    assert "differed after step 2" in (why_not_cut(Quantized, options) or "")


class WrapsAll(Quantized):
    """Wraps its state however few elements there are, in blocks of one: it bears cuts, but for its state."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, block=1, least=0)


def test_state_of_a_tensor_subclass_is_not_cut() -> None:
    assert "the state of" in (why_not_cut(WrapsAll, {}) or "")
    assert probe(WrapsAll, {}).separable


def test_tensor_subclasses_are_compared_by_what_they_hold() -> None:
    codes, scale = torch.ones(4, dtype=torch.int8), torch.ones(2)
    assert same(InBlocks(codes, scale), InBlocks(codes.clone(), scale.clone()))
    assert not same(InBlocks(codes, scale), InBlocks(codes, scale * 2))
    assert not same(InBlocks(codes, scale), InBlocks(codes * 2, scale))
    assert not same(InBlocks(codes, scale), codes.float())


def test_classes_that_draw_random_numbers_for_large_tensors_alone_are_refused() -> None:
    assert "random" in (probe(RoundsLarge, {}).coupling or "")


@pytest.mark.parametrize(
    "shape", [(50257, 768), (768, 50257), (4001, 385), (2**20,), (600, 400, 3, 3)], ids=str
)
def test_rows_of_a_large_weight_have_their_like_in_a_small_one(shape: tuple[int, ...]) -> None:
    ends = (112, 208, 464)
    found = like_rows(shape, ends)
    assert 0 < len(found) <= len(ends) + 1  # one for each piece, unless they are alike
    for start, stop in pairwise((0, *ends, shape[0])):
        real = [rows for rows in (start, stop - start, shape[0] - stop) if rows]
        assert any(_is_like(shape, real, *like) for like in found)


def _is_like(shape: tuple[int, ...], real: list[int], small: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
    """Whether pieces have as many elements as the real ones, but for multiples of 256, and enough."""
    assert sum(sizes) == small[0]
    assert prod(small) <= 2**19
    pairs = [
        (rows * prod(shape[1:]), size * prod(small[1:])) for rows, size in zip(real, sizes, strict=False)
    ]
    return len(real) == len(sizes) and all((a - b) % 256 == 0 and b >= min(4096, a) for a, b in pairs)


def test_all_pieces_of_a_small_weight_are_tried_as_they_are() -> None:
    assert like_rows((512, 80), (100, 200)) == [((512, 80), (100, 100, 312))]
    assert why_rows_not_cut(torch.optim.AdamW, {}, {}, CutRows(torch.float32, (512, 80), (100, 200))) is None


def test_a_parameter_that_cannot_be_tried_is_not_cut() -> None:
    class TakesVectors(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            if any(p.dim() > 1 for group in self.param_groups for p in group["params"]):
                raise ValueError("vectors only")
            super().step()

    given = TakesVectors, {"lr": 0.1}, {}
    assert why_rows_not_cut(*given, CutRows(torch.float32, (4096,), (1024,))) is None
    assert "could not be tried" in (why_rows_not_cut(*given, CutRows(torch.float32, (64, 64), (16,))) or "")


def test_nothing_is_cut_that_no_step_moves() -> None:
    cut = CutRows(torch.float32, (64, 64), (16,))
    assert "no element changed" in (why_rows_not_cut(torch.optim.SGD, {"lr": 0.1}, {"lr": 1e-30}, cut) or "")
