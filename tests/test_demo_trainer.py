"""Training: the same on any number of ranks, bit for bit after a resume, and every option does something."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pool import Pool, RankError
from zero_optim import checkpoint
from zero_optim.demo import prepare, text
from zero_optim.demo.config import SHARDED, RunConfig
from zero_optim.demo.display import Metric, Shard
from zero_optim.demo.train import Trainer
from zero_optim.plan.plan import ALIGNMENT_NBYTES

# Sums over ranks are taken in another order on another number of ranks, and gradients with them.
ROUNDING = 1e-5


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    path = tmp_path / "text"
    path.write_bytes(bytes(text.load((), 16).train[:4000].tolist()))
    return RunConfig(
        out=str(tmp_path),
        text=(str(path),),
        options=(("lr", 1e-2),),
        steps=8,
        warmup=2,
        batch_size=12,
        context=16,
        layers=2,
        width=16,
        heads=2,
    )


def make(config: RunConfig) -> Trainer:
    return Trainer(config, torch.device("cpu"), text.load(config.text, config.context))


def run(config: RunConfig, until: int, resume: bool = False) -> list[Metric]:
    """Update to a step, save there in the run folder, and give the records, seconds apart."""
    trainer = make(config)
    if resume:
        trainer.restore(str(prepare.locate(config.out)))
    records = []
    while trainer.step < until:
        record = trainer.update()
        records.append(replace(record, seconds=None, tokens_per_second=None, val_loss=trainer.evaluate()))
    assert 0 < trainer.save() < 10
    trainer.finish_saving()
    return records


def train(
    pool: Pool, world_size: int, config: RunConfig, until: int = 6, resume: bool = False
) -> list[Metric]:
    """Run on some ranks; every rank must have seen the same."""
    first, *others = pool.run(world_size, run, config, until, resume)
    assert all(other == first for other in others)
    return first


def losses(records: list[Metric]) -> list[float]:
    return [loss for record in records for loss in (record.train_loss, record.val_loss) if loss is not None]


def test_training_learns_and_does_not_depend_on_ranks_nor_micro_batches(
    pool: Pool, config: RunConfig
) -> None:
    on_one = losses(train(pool, 1, config))
    assert on_one[-1] < on_one[1] - 0.5
    for world_size, passes in ((2, 1), (2, 6), (3, 2)):
        other = losses(train(pool, world_size, replace(config, accumulate=passes)))
        assert other == pytest.approx(on_one, rel=ROUNDING)


def plain(records: list[Metric]) -> list[Metric]:
    """The records without what an overlapped run does not know."""
    return [replace(record, grad_norm=None) for record in records]


def test_losses_are_the_same_bits_with_either_ddp_with_overlap_and_with_the_plain_hook(
    pool: Pool, config: RunConfig
) -> None:
    config = replace(config, clip=0.0, accumulate=2)
    expected = plain(train(pool, 2, config))
    cases: tuple[dict[str, Any], ...] = (
        {"ddp": "torch"},
        {"hook": "allreduce"},
        {"overlap": "everywhere"},
        {"overlap": "owners"},
        {"overlap": "everywhere", "ddp": "torch"},
        {"overlap": "owners", "ddp": "torch"},
        {"shard": "gradients"},
        {"shard": "parameters"},
    )
    for options in cases:
        assert plain(train(pool, 2, replace(config, **options))) == expected, options
    clipped = replace(config, clip=0.05)
    with_norms = train(pool, 2, clipped)
    for shard in ("gradients", "parameters"):
        assert train(pool, 2, replace(clipped, shard=shard)) == with_norms, shard
    for hook in ("fp16", "bf16"):
        narrow = losses(train(pool, 2, replace(config, hook=hook, overlap="everywhere"), until=8))
        assert narrow[-1] < narrow[1] - 0.3, hook


# Three ranks: the fewest on which the order of a sum can differ.
@pytest.mark.parametrize(
    ("world_size", "accumulate", "shard"),
    [(2, 1, "state"), (3, 2, "state"), (3, 2, "gradients"), (3, 2, "parameters")],
)
def test_a_resumed_run_repeats_the_uninterrupted_one_bit_for_bit(
    pool: Pool, config: RunConfig, world_size: int, accumulate: int, shard: str
) -> None:
    config = replace(config, accumulate=accumulate, shard=shard)
    if accumulate > 1:
        config = replace(config, layers=4, width=64)
    whole = train(pool, world_size, config, until=8)
    parts = train(pool, world_size, config, until=3) + train(pool, world_size, config, until=8, resume=True)
    assert parts == whole


def test_a_run_goes_on_with_something_else_sharded_or_on_other_ranks(pool: Pool, config: RunConfig) -> None:
    whole = train(pool, 2, config, until=8)
    for first, then in (("state", "gradients"), ("state", "parameters"), ("parameters", "gradients")):
        parts = train(pool, 2, replace(config, shard=first), until=3)
        assert parts + train(pool, 2, replace(config, shard=then), until=8, resume=True) == whole
    parts = train(pool, 2, config, until=3) + train(pool, 3, config, until=6, resume=True)
    parts += train(pool, 1, config, until=8, resume=True)
    assert losses(parts) == pytest.approx(losses(whole), rel=ROUNDING)


def test_the_learning_rate_follows_its_options(pool: Pool, config: RunConfig) -> None:
    def rates(**changes: Any) -> list[float | None]:
        return [record.lr for record in train(pool, 1, replace(config, **changes), until=8)]

    assert rates(schedule="constant", warmup=3) == pytest.approx([0.0025, 0.005, 0.0075, *[1e-2] * 5])
    linear, cosine = rates(schedule="linear", warmup=0), rates(schedule="cosine", warmup=0)
    assert linear[0] == cosine[0] == 1e-2
    assert linear[-1] == pytest.approx(1e-3)
    assert linear[2] != cosine[2]


def test_an_option_changes_what_is_learned(pool: Pool, config: RunConfig) -> None:
    sgd = replace(config, optimizer="SGD")
    changes: tuple[tuple[RunConfig, dict[str, Any]], ...] = (
        (config, {"seed": 1}),
        (config, {"batch_size": 24}),
        (config, {"context": 32}),
        (config, {"layers": 1}),
        (config, {"width": 32}),
        (config, {"heads": 4}),
        (config, {"bf16": True}),
        (sgd, {"clip": 0.01}),
        (config, {"options": (("lr", 1e-3),)}),
        (config, {"optimizer": "RMSprop"}),
        (config, {"steps": 100}),
        (config, {"text": ()}),
    )
    unchanged = {id(base): losses(train(pool, 1, base)) for base in (config, sgd)}
    for base, change in changes:
        assert losses(train(pool, 1, replace(base, **change))) != unchanged[id(base)], change


def test_bf16_stays_near_and_keeps_its_weights_in_fp32(pool: Pool, config: RunConfig) -> None:
    exact = losses(train(pool, 2, config))
    assert losses(train(pool, 2, replace(config, bf16=True))) == pytest.approx(exact, rel=2e-2)
    manifest = checkpoint.Reader(prepare.locate(config.out)).manifest
    dtypes = {entry.dtype for key, entry in manifest.entries.items() if key.startswith("model/")}
    assert dtypes == {torch.float32}


def gradient_norms(config: RunConfig) -> tuple[float, float]:
    """Give the norm of one update's gradients as recorded, and the length of the SGD step it made."""
    trainer = make(config)
    with trainer.whole():
        before = torch.nn.utils.parameters_to_vector(trainer.gpt.parameters()).detach().clone()
    norm = trainer.update().grad_norm
    with trainer.whole():
        after = torch.nn.utils.parameters_to_vector(trainer.gpt.parameters()).detach()
    assert norm is not None
    return norm, (after - before).norm().item()


def test_clipping_bounds_the_norm_of_all_gradients_together(pool: Pool, config: RunConfig) -> None:
    config = replace(config, optimizer="SGD", options=(("lr", 1.0),), warmup=0)
    for shard in SHARDED:
        for norm, length in pool.run(2, gradient_norms, replace(config, clip=0.0, shard=shard)):
            assert norm > 0.1
            assert length == pytest.approx(norm, rel=1e-4)
        for norm, length in pool.run(2, gradient_norms, replace(config, clip=0.05, shard=shard)):
            assert norm > 0.1  # recorded as it was
            assert length == pytest.approx(0.05, rel=1e-3)


def measured(config: RunConfig) -> tuple[list[Shard], list[int], tuple[str, str]]:
    """Give the shards, the bytes of the model and of its largest block, and text that it generates."""
    trainer = make(config)
    trainer.update()
    with trainer.whole():
        before = [param.detach().clone() for param in trainer.gpt.parameters()]
    shards = trainer.shards()
    with trainer.whole():
        assert all(map(torch.equal, trainer.gpt.parameters(), before))  # measuring trains nothing
        sample = trainer.sample()
    blocks = [sum(param.nbytes for param in block.parameters()) for block in trainer.gpt.blocks]
    return shards, [sum(param.nbytes for param in trainer.gpt.parameters()), max(blocks)], sample


def test_each_rank_keeps_its_part_of_what_is_sharded(pool: Pool, config: RunConfig) -> None:
    config = replace(config, layers=4, sample_length=7)
    texts = set()
    for shard in SHARDED:
        for shards, (nbytes, largest), sample in pool.run(2, measured, replace(config, shard=shard)):
            assert sum(each.num_parameters for each in shards) == nbytes // 4
            for each in shards:
                # Two moments in fp32, and step counts.
                assert each.state_nbytes == pytest.approx(8 * each.num_parameters, rel=0.01)
                expected = None if shard == "state" else 4 * each.num_parameters
                assert each.gradient_nbytes == expected
            if shard == "parameters":
                row = ALIGNMENT_NBYTES  # a rank's room for a stamp, in each unit
                for each in shards:
                    assert each.parameter_nbytes == 4 * each.num_parameters + (config.layers + 1) * row
                rest = nbytes - 4 * largest  # in the outermost unit, which is whole all the time
                assert {each.peak_nbytes for each in shards} == {rest + 2 * largest + 3 * 2 * row}
            prompt, added = sample
            assert len(prompt.encode()) == 16
            assert 1 <= len(added) <= 7
            texts.add(sample)
    assert len(texts) == 1


def diverge(config: RunConfig) -> None:
    trainer = make(config)
    for _ in range(6):
        trainer.update()


def test_a_loss_that_is_no_number_ends_the_run_on_every_rank(forked_pool: Pool, config: RunConfig) -> None:
    with pytest.raises(RankError, match=r"DivergedError: the loss became .* lower --opt lr"):
        forked_pool.run(2, diverge, replace(config, optimizer="SGD", options=(("lr", math.inf),)))


def test_an_optimizer_without_a_learning_rate_trains_unscheduled(pool: Pool, config: RunConfig) -> None:
    records = train(pool, 2, replace(config, optimizer="A2GradUni", options=()))
    assert {record.lr for record in records} == {None}
    assert losses(records)[-1] < losses(records)[1]


def num_buckets(config: RunConfig) -> int:
    trainer = make(config)
    expected = sum(param.numel() for param in trainer.gpt.parameters())
    assert [shard.num_parameters for shard in trainer.shards()] == [expected]
    return len(trainer.optimizer.core.bucket_members())


def test_sharded_gradients_of_the_default_model_have_several_buckets_to_reduce(
    pool: Pool, config: RunConfig
) -> None:
    config = replace(config, layers=4, width=128, heads=4, optimizer="SGD", options=())
    assert pool.run(1, num_buckets, config) == [1]
    assert pool.run(1, num_buckets, replace(config, shard="gradients"))[0] > 2
