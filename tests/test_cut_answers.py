"""Whether a parameter is cut: all ranks must say yes, and options that change later are asked about again."""

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch_optimizer
from torch.nn import Parameter

from cuts import ONE_A_BUCKET, finely_cut
from own_classes import NormedBy, Quantized
from pool import on_ranks
from training import assert_same_bits, make_params, params_of, set_grads, train_both, twin
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.probe.cut_rows import why_not_cut
from zero_optim.probe.subject import under_test

SHAPES = ((64, 16), (32, 8), (7,))
LARGE = ((1024, 128),)  # its bucket is uneven enough to be told if it is not cut
RESULTS = "zero_optim.step.spec.why_class_not_cut"


def built(
    params: Sequence[Parameter], build: Callable[..., Any] = torch.optim.AdamW, **options: Any
) -> ZeroRedundancyOptimizer:
    with finely_cut():
        return ZeroRedundancyOptimizer(params, build, bucket_cap_mb=ONE_A_BUCKET, **options)


def num_cut(sharded: ZeroRedundancyOptimizer) -> int:
    return sum(len(pieces) > 1 for pieces in sharded.pieces().values())


# ------------------------------------------------------------------ all ranks say yes


@on_ranks(2)
def test_a_parameter_is_cut_only_if_all_ranks_say_that_it_may_be() -> None:
    """One rank has another processor: its trials find a difference."""
    answer = None if dist.get_rank() == 0 else "rounds otherwise here"
    params = make_params(LARGE)
    plain = torch.optim.AdamW(params, lr=0.01)
    with patch(RESULTS, lambda *_: answer):
        mine = built(twin(params), lr=0.01)
        assert num_cut(mine) == 0
        (line,) = mine.explain().cuts
    assert (answer or "another rank, with another processor, found a difference") in line, line
    train_both(plain, mine, 2)


@on_ranks(2)
def test_explain_tells_what_is_cut_and_why_the_rest_is_not() -> None:
    """One model of AdamW that is cut, with a group of Muon-like matrices that are not."""
    params = make_params(((1024, 128), (96, 16), (400, 100)))
    texts = []
    for optimizer_class in (torch.optim.AdamW, torch.optim.Adafactor):
        sharded = ZeroRedundancyOptimizer(twin(params), optimizer_class, lr=0.1)
        set_grads(params_of(sharded), 0)
        sharded.step()
        told = sharded.explain()
        mine = told.ranks[dist.get_rank()]
        assert mine.num_params == len(sharded.owned_parameters())
        assert mine.state_nbytes == sharded.state_nbytes()
        assert sum(rank.numel for rank in told.ranks) == sum(p.numel() for p in params)
        if optimizer_class is torch.optim.AdamW:
            # Two moments of float32, and a step for each parameter.
            assert mine.state_nbytes == 2 * mine.param_nbytes + 4 * mine.num_params
        assert ("cut: parameter" in str(told)) == (max(map(len, sharded.pieces().values())) > 1)
        texts.append(str(told))
    everyone: list[list[str]] = [[]] * 2
    dist.all_gather_object(everyone, texts)
    assert everyone[0] == everyone[1]
    cut, whole = texts
    assert "cut: parameter 0 of group 0 (shape (1024, 128)) in 2 pieces, owners [0, 1]" in cut
    assert "not cut:" not in cut
    assert "balance: fullest rank / mean = 1.00" in cut
    assert "x the mean (Adafactor: " in whole


# ------------------------------------------------------------------ dtypes


@on_ranks(2)
def test_on_the_cpu_half_precision_is_cut_only_where_masters_are_stepped() -> None:
    params = make_params(LARGE, torch.bfloat16)
    options = {"weight_decay": 0.1, "eps": 1e-3}  # a smaller one is zero in half precision
    plain = torch.optim.RMSprop(params, **options)
    sharded = built(twin(params), torch.optim.RMSprop, **options)
    assert num_cut(sharded) == 0
    assert any("end of a vector" in line for line in sharded.explain().cuts)
    train_both(plain, sharded, 3)
    assert num_cut(built(twin(params), torch.optim.RMSprop, master_dtype=torch.float32)) == 1


# ------------------------------------------------------------------ options that change


@on_ranks(2)
def test_an_option_set_later_that_forbids_cuts_raises_on_every_rank() -> None:
    params = make_params(SHAPES)
    plain, sharded = NormedBy(params), built(twin(params), NormedBy)
    assert num_cut(sharded) == 2
    train_both(plain, sharded, 2)
    before = [param.detach().clone() for param in params_of(sharded)]
    for optimizer in (plain, sharded):
        optimizer.param_groups[0]["trust"] = True
    for _ in range(2):
        with pytest.raises(ValueError, match=r"of group 0.*trust=True.*NormedBy: cut.*cuts=False"):
            sharded.step()
        assert_same_bits(params_of(sharded), before)
    for optimizer in (plain, sharded):
        optimizer.param_groups[0]["trust"] = False
    train_both(plain, sharded, 2, first=2)


@on_ranks(2)
def test_a_state_dict_whose_options_forbid_cuts_changes_nothing() -> None:
    params = make_params(SHAPES)
    plain = NormedBy(params, trust=True)
    sharded = built(twin(params), NormedBy, lr=0.5)
    with pytest.raises(ValueError, match=r"trust=True.*Build the optimizer with these options"):
        sharded.load_state_dict(plain.state_dict())
    assert sharded.param_groups[0]["trust"] is False
    assert sharded.param_groups[0]["lr"] == 0.5
    train_both(NormedBy(params, lr=0.5), sharded, 2)
    whole = built(twin(params), NormedBy, trust=True)
    assert num_cut(whole) == 0
    whole.load_state_dict(plain.state_dict())


@on_ranks(2)
def test_weight_decay_that_a_state_dict_brings_is_borne_or_nothing_was_cut() -> None:
    params = make_params(SHAPES)
    plain = torch_optimizer.LARS(params, lr=0.1, weight_decay=1e-2)
    sharded = built(twin(params), torch_optimizer.LARS, lr=0.1)
    sharded.load_state_dict(plain.state_dict())
    train_both(plain, sharded, 3)


# ------------------------------------------------------------------ classes that work in blocks


def num_pieces_trained(shapes: Sequence[tuple[int, ...]], options: dict[str, Any]) -> list[int]:
    """Train as without sharding, and give the number of pieces of each parameter."""
    params = make_params(shapes)
    plain = Quantized(params, **options)
    sharded = ZeroRedundancyOptimizer(twin(params), Quantized, **options)
    train_both(plain, sharded, 4)
    return [len(pieces) for pieces in sharded.pieces().values()]


# What torchao's classes trained otherwise where it was cut: blocks of 256 fill them, and they are long.
IN_BLOCKS = ((512, 80), (5025, 384), (3001, 640), (4001, 128))
BLOCKS = [{}, {"block": 128, "wraps": False}]
# Their sizes fit no tensor of a trial, but those that are cut.
ODD = [{"block": 1000, "least": 60_000}, {"block": 256, "least": 100_000}]


@on_ranks(2)
@pytest.mark.parametrize("options", BLOCKS, ids=str)
def test_state_in_blocks_trains_as_without_sharding(options: dict[str, Any]) -> None:
    for shape in IN_BLOCKS:
        assert num_pieces_trained([shape, (33, 7)], options) == [1, 1], shape


@on_ranks(2)
@pytest.mark.parametrize("options", ODD, ids=str)
def test_blocks_and_thresholds_of_any_size_are_seen_where_the_very_rows_are_tried(
    options: dict[str, Any],
) -> None:
    options = {**options, "wraps": False}
    assert why_not_cut(under_test(Quantized, options)) is None
    assert num_pieces_trained([(1000, 160), (33, 7)], options) == [1, 1]
    # Of blocks that its rows do not fill, none is ever made.
    assert max(num_pieces_trained([(1001, 161), (33, 7)], options)) == 2
    if options["block"] != 1000:  # whose blocks lie in one half or the other
        alone = ZeroRedundancyOptimizer(make_params(((1000, 160),)), Quantized, **options)
        (line,) = alone.explain().cuts
        assert "with rows of (1000, 160) cut at" in line


@on_ranks(2)
def test_what_is_cut_instead_of_another_is_tried_too() -> None:
    """The first fills blocks and stays whole; so the second is cut elsewhere, and is tried there too."""
    options = {"block": 1000, "least": 60_000, "wraps": False}
    assert num_pieces_trained([(1000, 160), (1001, 161), (501, 161)], options)[:2] == [1, 2]
