"""What a run is asked to be is checked, and survives being written down."""

import pytest

from zero_optim.demo.config import ModelShape, RunConfig, defaults


def test_a_config_reads_back_from_its_json() -> None:
    config = RunConfig(
        out="there", text=("a", "b"), options=(("betas", (0.5, 0.9)), ("fused", True), ("lr", 1e-3)), clip=0.0
    )
    assert RunConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("field", "value", "line"),
    [
        ("steps", 0, "--steps must be at least 1"),
        ("batch_size", -1, "--batch-size must be at least 1"),
        ("seed", 2**64, r"--seed must be below 2\*\*64, as PyTorch's seeds are, got 18446744073709551616"),
        ("out", "", "--out must be the name of a folder, got ''"),
        ("warmup", -1, "--warmup must be at least 0"),
        ("clip", -1.0, "--clip"),
        ("schedule", "cubic", "--lr-schedule must be one of cosine, linear, constant"),
        ("device", "tpu", "--device"),
        ("heads", 128, "even number"),
    ],
)
def test_a_value_that_makes_no_run_is_refused_by_the_name_of_its_option(
    field: str, value: object, line: str
) -> None:
    with pytest.raises(ValueError, match=line):
        RunConfig(**{"out": "there", field: value})


def test_a_batch_must_split_evenly_over_ranks_and_micro_batches() -> None:
    RunConfig(out="there", batch_size=12, accumulate=2).check_ranks(3)
    with pytest.raises(ValueError, match="multiple of 3"):
        RunConfig(out="there", batch_size=16).check_ranks(3)
    with pytest.raises(ValueError, match="multiple of 8"):
        RunConfig(out="there", batch_size=12, accumulate=4).check_ranks(2)


def test_defaults_make_a_run() -> None:
    config = RunConfig(out="there", **defaults())
    config.check_ranks(config.nproc)
    assert config.shape == ModelShape(context=128, layers=4, width=128, heads=4)
