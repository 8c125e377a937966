"""Training: the same on any number of ranks, bit for bit after a resume, and every option does something."""

import math
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch

from pool import Pool, RankError
from zero_optim import checkpoint
from zero_optim.demo import prepare, text
from zero_optim.demo.config import CommHook, RunConfig, Sharded
from zero_optim.demo.metrics import Metric
from zero_optim.demo.trainer import Shard, Trainer
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
    made = []
    while trainer.step < until:
        record = trainer.update()
        made.append(replace(record, seconds=None, tokens_per_second=None, val_loss=trainer.evaluate()))
    assert 0 < trainer.save() < 10
    trainer.finish_saving()
    return made


def train(
    pool: Pool, world_size: int, config: RunConfig, until: int = 6, resume: bool = False
) -> list[Metric]:
    """Run on some ranks; every rank must have seen the same."""
    first, *others = pool.run(world_size, run, config, until, resume)
    assert all(other == first for other in others)
    return first


def losses(made: list[Metric]) -> list[float]:
    return [loss for record in made for loss in (record.train_loss, record.val_loss) if loss is not None]


def test_training_learns_and_does_not_depend_on_the_number_of_ranks(pool: Pool, config: RunConfig) -> None:
    on_one = losses(train(pool, 1, config))
    assert on_one[-1] < on_one[1] - 0.5
    for world_size in (2, 4):
        assert losses(train(pool, world_size, config)) == pytest.approx(on_one, rel=ROUNDING)


def plain(made: list[Metric]) -> list[Metric]:
    """MetricsFile without what an overlapped run does not know."""
    return [replace(record, grad_norm=None) for record in made]


def test_losses_are_the_same_bits_with_either_ddp_with_overlap_and_with_the_plain_hook(
    pool: Pool, config: RunConfig
) -> None:
    config = replace(config, clip=0.0, accumulate=2)
    expected = plain(train(pool, 2, config))
    for options in (
        {"ddp": "torch"},
        {"hook": "allreduce"},
        {"overlap": "everywhere"},
        {"overlap": "owners"},
        {"overlap": "everywhere", "ddp": "torch"},
        {"overlap": "owners", "ddp": "torch"},
        {"shard": "gradients"},
        {"shard": "parameters"},
    ):
        assert plain(train(pool, 2, replace(config, **options))) == expected, options  # type: ignore[arg-type]


@pytest.mark.parametrize("shard", ["gradients", "parameters"])
def test_clipped_losses_and_norms_are_the_same_bits_with_gradients_or_parameters_sharded(
    pool: Pool, config: RunConfig, shard: Sharded
) -> None:
    config = replace(config, clip=0.05)
    assert train(pool, 2, replace(config, shard=shard)) == train(pool, 2, config)


@pytest.mark.parametrize("hook", ["fp16", "bf16"])
def test_the_demo_converges_with_every_hook_overlapped(pool: Pool, config: RunConfig, hook: CommHook) -> None:
    config = replace(config, clip=0.0, hook=hook, overlap="everywhere")
    found = losses(train(pool, 2, config, until=8))
    assert found[-1] < found[1] - 0.3


def test_micro_batches_add_up_to_the_batch(pool: Pool, config: RunConfig) -> None:
    whole = losses(train(pool, 2, config))
    for passes in (2, 6):
        assert losses(train(pool, 2, replace(config, accumulate=passes))) == pytest.approx(
            whole, rel=ROUNDING
        )


# Three ranks: the fewest on which the order of a sum can differ.
@pytest.mark.parametrize(
    ("world_size", "accumulate", "shard"),
    [
        (2, 1, "state"),
        (3, 1, "state"),
        (3, 2, "state"),
        (4, 1, "state"),
        (3, 2, "gradients"),
        (3, 2, "parameters"),
    ],
)
def test_a_resumed_run_repeats_the_uninterrupted_one_bit_for_bit(
    pool: Pool, config: RunConfig, world_size: int, accumulate: int, shard: Sharded
) -> None:
    config = replace(config, accumulate=accumulate, shard=shard)
    if accumulate > 1:
        config = replace(config, layers=4, width=64)
    whole = train(pool, world_size, config, until=8)
    parts = train(pool, world_size, config, until=3) + train(pool, world_size, config, until=8, resume=True)
    assert parts == whole


@pytest.mark.parametrize(
    ("first", "then"), [("state", "gradients"), ("state", "parameters"), ("parameters", "gradients")]
)
def test_a_run_goes_on_with_something_else_sharded(
    pool: Pool, config: RunConfig, first: Sharded, then: Sharded
) -> None:
    whole = train(pool, 2, config)
    parts = train(pool, 2, replace(config, shard=first), until=3)
    assert parts + train(pool, 2, replace(config, shard=then), resume=True) == whole


def test_a_run_goes_on_with_another_number_of_ranks(pool: Pool, config: RunConfig) -> None:
    whole = losses(train(pool, 2, config, until=8))
    parts = train(pool, 2, config, until=3) + train(pool, 4, config, until=6, resume=True)
    parts += train(pool, 1, config, until=8, resume=True)
    assert losses(parts) == pytest.approx(whole, rel=ROUNDING)


def test_the_learning_rate_follows_its_options(pool: Pool, config: RunConfig) -> None:
    def rates(**changes: object) -> list[float | None]:
        return [record.lr for record in train(pool, 1, replace(config, **changes), until=8)]

    assert rates(schedule="constant", warmup=0) == [1e-2] * 8
    assert rates(schedule="constant", warmup=3)[:4] == pytest.approx([0.0025, 0.005, 0.0075, 0.01])
    linear, cosine = rates(schedule="linear", warmup=0), rates(schedule="cosine", warmup=0)
    assert linear[0] == cosine[0] == 1e-2
    assert linear[-1] == pytest.approx(1e-3)
    assert linear[2] != cosine[2]


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 1},
        {"batch_size": 24},
        {"context": 32},
        {"layers": 1},
        {"width": 32},
        {"heads": 4},
        {"bf16": True},
        {"clip": 0.01, "optimizer": "SGD"},
        {"options": (("lr", 1e-3),)},
        {"optimizer": "RMSprop"},
        {"steps": 100},
        {"text": ()},
    ],
    ids=" ".join,
)
def test_an_option_changes_what_is_learned(pool: Pool, config: RunConfig, changes: dict[str, object]) -> None:
    base = replace(config, optimizer="SGD") if changes.get("optimizer") == "SGD" else config
    assert losses(train(pool, 1, replace(base, **changes))) != losses(train(pool, 1, base))


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
    for shard in get_args(Sharded):
        for norm, length in pool.run(2, gradient_norms, replace(config, clip=0.0, shard=shard)):
            assert norm > 0.1
            assert length == pytest.approx(norm, rel=1e-4)
        for norm, length in pool.run(2, gradient_norms, replace(config, clip=0.05, shard=shard)):
            assert norm > 0.1  # recorded as it was
            assert length == pytest.approx(0.05, rel=1e-3)


def measured(config: RunConfig) -> tuple[list[tuple[int, int]], int, tuple[str, str]]:
    trainer = make(config)
    trainer.update()
    shards = [(shard.num_parameters, shard.state_nbytes) for shard in trainer.shards()]
    return shards, sum(parameter.numel() for parameter in trainer.gpt.parameters()), trainer.sample()


def test_each_rank_keeps_its_part_of_the_state(pool: Pool, config: RunConfig) -> None:
    for shards, numel, (given, added) in pool.run(2, measured, replace(config, sample_length=7)):
        assert sum(owned for owned, _ in shards) == numel
        for owned, nbytes in shards:
            assert nbytes == pytest.approx(2 * 4 * owned, rel=0.01)  # two moments in fp32, and step counts
        assert len(given.encode()) == 16
        assert 1 <= len(added) <= 7


def gradients_held(config: RunConfig) -> list[tuple[int, int | None]]:
    trainer = make(config)
    trainer.update()
    before = [param.detach().clone() for param in trainer.gpt.parameters()]
    shards = trainer.shards()
    assert all(map(torch.equal, trainer.gpt.parameters(), before))  # measuring trains nothing
    return [(shard.num_parameters, shard.gradient_nbytes) for shard in shards]


def test_each_rank_keeps_the_gradients_of_what_it_owns_where_they_are_sharded(
    pool: Pool, config: RunConfig
) -> None:
    for shards in pool.run(2, gradients_held, replace(config, shard="gradients")):
        assert [held for _, held in shards] == [4 * owned for owned, _ in shards]
    assert [held for _, held in pool.run(2, gradients_held, config)[0]] == [None, None]


def parameters_kept(config: RunConfig) -> tuple[list[Shard], int, int, str]:
    """Give the shards, the bytes of the model and of its largest block, and text that it generates."""
    trainer = make(config)
    trainer.update()
    shards = trainer.shards()
    blocks = [sum(param.nbytes for param in block.parameters()) for block in trainer.gpt.blocks]
    with trainer.whole():
        _, added = trainer.sample()
    return shards, sum(param.nbytes for param in trainer.gpt.parameters()), max(blocks), added


def test_each_rank_keeps_the_parameters_it_owns_where_they_are_sharded(pool: Pool, config: RunConfig) -> None:
    config = replace(config, layers=4, shard="parameters", sample_length=7)
    whole = replace(config, shard="gradients")
    room = ALIGNMENT_NBYTES  # in each row, for a stamp
    num_units = config.layers + 1
    for shards, nbytes, largest, added in pool.run(2, parameters_kept, config):
        for shard in shards:
            assert shard.parameter_nbytes == 4 * shard.num_parameters + num_units * room
        assert sum(shard.num_parameters for shard in shards) == nbytes // 4
        rest = nbytes - 4 * largest  # in the outermost unit, which is whole all the time
        assert {shard.peak_nbytes for shard in shards} == {rest + 2 * largest + 3 * 2 * room}
        assert added == pool.run(2, parameters_kept, whole)[0][3]


def diverge(config: RunConfig) -> None:
    trainer = make(config)
    for _ in range(6):
        trainer.update()


def test_a_loss_that_is_no_number_ends_the_run_on_every_rank(forked_pool: Pool, config: RunConfig) -> None:
    with pytest.raises(RankError, match=r"DivergedError: the loss became .* lower --opt lr"):
        forked_pool.run(2, diverge, replace(config, optimizer="SGD", options=(("lr", math.inf),)))


def test_an_optimizer_without_a_learning_rate_trains_unscheduled(pool: Pool, config: RunConfig) -> None:
    made = train(pool, 2, replace(config, optimizer="A2GradUni", options=()))
    assert {record.lr for record in made} == {None}
    assert losses(made)[-1] < losses(made)[1]
