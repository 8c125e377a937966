"""Hooks by name, and the logging hook."""

import logging
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pool import Ranks
from test_hooks_bucket import FakeBucket, grads_of, make_params, run_hook
from zero_optim.hooks import (
    BucketRecord,
    LoggingState,
    PowerSGDState,
    TopKState,
    allreduce_hook,
    hook_names,
    hook_options,
    hook_summary,
    logging_hook,
    make_hook,
    parse_hook_options,
    quantization_perchannel_hook,
    topk_hook,
)


def test_every_name_has_a_hook_options_and_a_summary() -> None:
    for name in hook_names():
        state, hook = make_hook(name)
        assert callable(hook)
        assert {"wrap", "log"} <= hook_options(name).keys()
        assert len(hook_summary(name)) > 10
        assert not isinstance(state, LoggingState)


def test_options_from_a_command_line_are_converted() -> None:
    options = parse_hook_options(
        ["rank=4", "min-rate=1.5", "warm_start=no", "epsilon=1e-8", "start=7", "seed = 2"]
    )
    state, hook = make_hook("power_sgd", **options)
    assert hook.__name__ == "powerSGD_hook"
    assert isinstance(state, PowerSGDState)
    assert (state.matrix_approximation_rank, state.min_compression_rate) == (4, 1.5)
    assert (state.warm_start, state.orthogonalization_epsilon) == (False, 1e-8)
    assert (state.start_powerSGD_iter, state.random_seed) == (7, 2)
    assert make_hook("power_sgd", rank=4.0).state.matrix_approximation_rank == 4
    state, hook = make_hook("top_k", ratio=0.5, wrap="bf16", log="true")
    assert isinstance(state, LoggingState)
    assert isinstance(state.state, TopKState)
    assert hook.__name__ == "logging_bfloat16_topk_hook"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("powersgd", {}, r"expected one of the hooks allreduce, fp16, .*noop, got 'powersgd'"),
        ("power_sgd", {"rnk": 2}, r"'power_sgd' has no option 'rnk': it has rank, start, min_rate"),
        ("allreduce", {"rank": 2}, r"'allreduce' has no option 'rank': it has wrap, log"),
        (
            "power_sgd",
            {"rank": "two"},
            r"expected hook option power_sgd.rank to be a whole number, got 'two'",
        ),
        ("power_sgd", {"rank": 2.5}, r"power_sgd.rank to be a whole number, got 2.5"),
        ("power_sgd", {"warm_start": "maybe"}, r"power_sgd.warm_start to be true or false, got 'maybe'"),
        ("power_sgd", {"rank": 0}, r"expected matrix_approximation_rank of at least 1, got 0"),
        ("top_k", {"ratio": "much"}, r"top_k.ratio to be a number, got 'much'"),
        ("top_k", {"ratio": 1.5}, r"ratio above 0 and at most 1, got 1.5"),
        ("top_k", {"start": -1}, r"start_iter of at least 0, got -1"),
        ("fp16", {"wrap": "int4"}, r"wrap to be one of none, fp16, bf16, got 'int4'"),
        ("quantize_channel", {"group_size": 0}, r"group_size of at least 1 element, got 0"),
        ("post_local_sgd", {"start": -2}, r"start_localSGD_iter of at least 0, got -2"),
    ],
)
def test_what_does_not_exist_or_fit_is_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_hook(name, **options)


def test_malformed_texts_are_refused() -> None:
    with pytest.raises(ValueError, match="as name=value, got 'rank'"):
        parse_hook_options(["rank"])
    with pytest.raises(ValueError, match="'rank' is given twice: '1' and '2'"):
        parse_hook_options(["rank=1", "rank=2"])
    with pytest.raises(ValueError, match="group_size of at least 1 element, got 0"):
        quantization_perchannel_hook(None, None, 0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="init_process_group"):
        allreduce_hook(None, None)  # type: ignore[arg-type]


def check_logging() -> list[BucketRecord]:
    records: list[BucketRecord] = []
    params = make_params(((4, 3), (2,)), torch.bfloat16)
    state, hook = LoggingState(None, records.append), logging_hook(allreduce_hook)
    for step in range(2):
        for index in range(2):
            bucket = FakeBucket(params, grads_of(params, dist.get_rank(), step), index, index == 1)
            plain = FakeBucket(params, grads_of(params, dist.get_rank(), step))
            result = hook(state, bucket).wait()
            assert torch.equal(result, allreduce_hook(None, plain).wait())  # type: ignore[arg-type]
    seen: list[str] = []

    class Keeper(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(record.getMessage())

    keeper, logger = Keeper(), logging.getLogger("zero_optim.hooks")
    logger.addHandler(keeper)
    logger.setLevel(logging.INFO)
    try:
        run_hook(hook, LoggingState(), params)
    finally:
        logger.removeHandler(keeper)
        logger.setLevel(logging.NOTSET)
    (line,) = seen
    assert line.startswith(
        "iteration 0 bucket 0 (last): 2 parameters, 14 elements, 28 bytes, torch.bfloat16 on cpu, "
    )
    return records


def test_the_logging_hook_reports_each_bucket_and_changes_nothing(ranks2: Ranks) -> None:
    for records in ranks2.run(check_logging):
        assert [(r.iteration, r.index, r.is_last) for r in records] == [
            (0, 0, False), (0, 1, True), (1, 0, False), (1, 1, True)
        ]  # fmt: skip
        for record in records:
            assert (record.num_parameters, record.numel, record.nbytes) == (2, 14, 28)
            assert (record.dtype, record.device) == (torch.bfloat16, torch.device("cpu"))
            assert 0 < record.seconds < 60


def check_top_k_resume() -> None:
    params = make_params()
    state = TopKState(ratio=0.1)
    for step in range(3):
        run_hook(topk_hook, state, params, step)
    loaded = TopKState(ratio=0.1)
    loaded.load_state_dict(state.state_dict())
    named = [(str(index), param) for index, param in enumerate(params)]
    by_name = TopKState(ratio=0.1)
    by_name.load_state_dict(state.state_dict(named), named)
    copies = [pickle.loads(pickle.dumps(state)), loaded, by_name]
    expected = run_hook(topk_hook, state, params, 3)
    for copied in copies:
        assert torch.equal(run_hook(topk_hook, copied, params, 3), expected)
        assert copied.iteration == state.iteration
    with pytest.raises(ValueError, match="use_error_feedback=True saved, False here"):
        TopKState(use_error_feedback=False).load_state_dict(state.state_dict())
    late = TopKState(ratio=0.1, start_iter=1)
    whole, part = (run_hook(topk_hook, late, params, step) for step in range(2))
    assert int((whole != 0).sum()) == whole.numel()
    assert 0 < int((part != 0).sum()) < part.numel() / 2


def test_top_k_goes_on_where_it_stopped_bit_for_bit(ranks2: Ranks) -> None:
    ranks2.run(check_top_k_resume)
