"""Every optimizer class of other packages gives the bits of its unsharded run, or is refused."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from classes import OPTIONS, PACKAGES, Trainee, documented, module_named, page_of, sweep

from pool import Pool, on_ranks
from training import assert_same_bits, params_of, twin
from zero_optim import checkpoint
from zero_optim.probe.probe import probe
from zero_optim.probe.subject import under_test

# Classes that write into their groups what they have: the number of elements, a count, a rate.
WRITING = ("heavyball.AdamW", "heavyball.MSAMLaProp", "heavyball.SUDSAdamW", "timm.optim.Adafactor")
# By default they step parameters of one shape as a batch, on some processors with other bits than apart.
BY_PARAMETER = ("heavyball.SOAP", "heavyball.SOLP")


@pytest.mark.parametrize("package", PACKAGES)
def test_every_class_is_equal_or_refused_as_the_page_says(pool: Pool, package: str) -> None:
    results, other = pool.run(2, sweep, package, timeout=1000)
    assert len(results) == len(other) > 0
    assert {name: result for name, result in results.items() if result.answer == "wrong"} == {}
    assert page_of(package, results) == documented(package)


@on_ranks(3, timeout=1000)
@pytest.mark.parametrize("name", [*WRITING, *BY_PARAMETER])
def test_classes_that_write_down_what_they_have_train_for_long(name: str, tmp_path: Path) -> None:
    """Clipped, with parameters frozen for a while; on two ranks, then on three, and on each alone."""
    torch.compiler.set_stance("force_eager")
    package, _, kind = name.rpartition(".")
    build = getattr(module_named(package), kind)
    options = {"multi_tensor": False} if name in BY_PARAMETER else OPTIONS.get(name, {})
    assert probe(under_test(build, options)).idle
    trainee = Trainee(build, options, {}, "any shape", gaps=True)
    first = dist.new_group([0, 1])
    apart = [dist.new_group([rank]) for rank in range(3)][dist.get_rank()]
    plain = trainee.plain(trainee.params())
    sharded = trainee.sharded(trainee.params(), process_group=first) if dist.get_rank() < 2 else None
    runs = [plain] if sharded is None else [plain, sharded]
    go_on(trainee, runs, range(24))
    if sharded is not None:
        checkpoint.save(tmp_path / "saved", optimizer=sharded)
        sharded.consolidate_state_dict(to=None)
        runs.append(trainee.plain(twin(params_of(plain))))
        runs[-1].load_state_dict(sharded.state_dict())
    dist.barrier()
    for group in (None, apart):
        runs.append(trainee.sharded(twin(params_of(plain)), process_group=group))
        checkpoint.load(tmp_path / "saved", optimizer=runs[-1])
    go_on(trainee, runs, range(24, 36))


def go_on(trainee: Trainee, runs: list[torch.optim.Optimizer], steps: range) -> None:
    for number in steps:
        for run in runs:
            params = params_of(run)
            for index, param in enumerate(params):
                param.requires_grad_(not (8 <= number % 24 < 14 and index % 3 == 1))
            trainee.step(run, number, max_norm=2.0)
        for run in runs[1:]:
            assert_same_bits(params_of(run), params_of(runs[0]), f"after step {number}")
