"""The text: how it is split, and in which order it comes."""

from pathlib import Path

import pytest
import torch

from zero_optim.demo import text
from zero_optim.demo.text import Samples

TOKENS = torch.arange(250, dtype=torch.uint8)  # every byte differs, so a sample tells where it was cut


def starts(samples: Samples, first: int, count: int) -> list[int]:
    inputs, targets = samples.take(first, count)
    assert inputs.shape == targets.shape == (count, samples.context)
    assert torch.equal(targets, inputs + 1)  # the byte that follows
    return inputs[:, 0].tolist()


def test_the_default_text_is_the_language_reference_and_its_last_tenth_is_held_out() -> None:
    corpus = text.load((), context=128)
    assert corpus.numel > 300_000
    assert corpus.held_out.numel() == corpus.numel // 10
    assert b"statement" in bytes(corpus.train.tolist())


def test_files_are_joined_as_bytes(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\xff" * 60)
    (tmp_path / "b").write_bytes(b"b" * 59)
    corpus = text.load([str(tmp_path / "a"), str(tmp_path / "b")], context=4)
    assert bytes(torch.cat((corpus.train, corpus.held_out)).tolist()) == b"\xff" * 60 + b"\n" + b"b" * 59
    assert corpus.name == "a, b"
    assert corpus.digest != text.load([str(tmp_path / "a")] * 2, context=4).digest


def test_a_text_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"x" * 89)
    lines = {
        "nowhere": "no such file",
        "text": "has 89 bytes, --context 8 needs 90",
        ".": "not a regular file",
    }
    for name, line in lines.items():
        with pytest.raises(ValueError, match=line):
            text.load([str(tmp_path / name)], context=8)


def test_a_pass_over_the_text_takes_every_window_once_and_the_next_one_another_order() -> None:
    samples = Samples(TOKENS, context=10, seed=1)
    num_windows = (250 - 1) // 10 - 1
    one, two = starts(samples, 0, num_windows), starts(samples, num_windows, num_windows)
    assert sorted(one) == list(range(min(one), 250 - 10, 10))[:num_windows]
    assert len(set(two)) == num_windows
    assert sorted(one) != one
    assert one != two


def test_the_order_does_not_depend_on_how_samples_are_asked_for() -> None:
    samples = Samples(TOKENS, context=10, seed=1)
    together = starts(samples, 3, 40)
    assert [start for first in range(3, 43, 5) for start in starts(samples, first, 5)] == together
    assert starts(Samples(TOKENS, context=10, seed=2), 3, 40) != together


def test_a_text_of_one_sample_gives_that_sample() -> None:
    assert starts(Samples(TOKENS[:11], context=10, seed=0), 0, 3) == [0, 0, 0]


@pytest.mark.parametrize("world_size", [1, 2, 3, 30])
def test_ranks_together_validate_on_every_held_out_window_once(world_size: int) -> None:
    seen = [
        start
        for rank in range(world_size)
        for inputs, _ in text.held_out_windows(TOKENS, 10, rank, world_size)
        for start in inputs[:, 0].tolist()
    ]
    assert sorted(seen) == list(range(0, 240, 10))


def test_a_long_held_out_text_is_sampled_evenly() -> None:
    tokens = torch.zeros(100_000, dtype=torch.uint8)
    counts = [len(inputs) for inputs, _ in text.held_out_windows(tokens, 10, 0, 1)]
    assert sum(counts) == text.MAX_EVAL_WINDOWS


def test_seeds_of_different_numbers_differ() -> None:
    seeds = {text.mix(seed, step, rank) for seed in range(5) for step in range(50) for rank in range(4)}
    assert len(seeds) == 1000
    assert all(0 <= seed < 2**32 for seed in seeds)
