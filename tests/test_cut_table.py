"""Every optimizer class with cut parameters: those that bear cuts give the bits of the unsharded run."""

import pytest
import torch.distributed as dist

from cuts import ONE_A_BUCKET, SHAPES, finely_cut
from optimizer_cases import BITWISE, CASES, Feed, Options
from pool import Ranks
from test_optimizers import assert_same_options, check_saved, train_case
from training import make_params, params_of, twin
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.probe.cut_rows import why_not_cut

# What classes of torch_optimizer call, and what PyTorch says of it.
pytestmark = pytest.mark.filterwarnings(r"ignore:This overload of \w+ is deprecated:UserWarning")

WIDE = tuple(shape for shape in SHAPES if 0 not in shape)
FED: dict[Feed, tuple[tuple[int, ...], ...]] = {
    "any shape": WIDE,
    "no kernels": tuple(shape for shape in WIDE if len(shape) <= 2),
    "at least 1-d": tuple(shape for shape in WIDE if shape),
    "matrices": ((64, 16), (16, 8), (48, 16)),
    "sparse rows": ((64, 4), (48, 8), (7, 2), (32, 16)),
}


def check_case(name: str, options: Options) -> bool:
    """As the check of the table: ten steps, then the state is saved, and runs with other owners go on."""
    case = CASES[name]
    params = make_params(FED[case.feed])
    plain = case.optimizer_class(params, **options)
    sharded = ZeroRedundancyOptimizer(
        twin(params), case.optimizer_class, bucket_cap_mb=ONE_A_BUCKET, **options
    )
    is_cut = any(len(pieces) == dist.get_world_size() for pieces in sharded.pieces().values())
    assert is_cut == (why_not_cut(case.optimizer_class, options, [{}]) is None)
    assert not is_cut or len(sharded.explain(quiet=True).cuts) >= 2
    assert_same_options(sharded, plain)
    train_case(case, plain, sharded, range(10))
    if case.saves and case.rates:  # else the caches of step sizes differ with what a rank owns
        check_saved(case, plain, sharded, options)
    whole = ZeroRedundancyOptimizer(twin(params_of(plain)), case.optimizer_class, cuts=False, **options)
    assert all(len(pieces) == 1 for pieces in whole.pieces().values())
    return is_cut


def check_all_options(name: str) -> list[bool]:
    with finely_cut():
        return [check_case(name, options) for options in CASES[name].options]


@pytest.mark.parametrize("name", BITWISE)
def test_every_class_gives_the_same_bits_cut_or_not(ranks2: Ranks, name: str) -> None:
    ranks2.run(check_all_options, name)
