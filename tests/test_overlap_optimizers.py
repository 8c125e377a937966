"""Every optimizer class gives the bits of the run without overlap, or is refused."""

from collections.abc import Iterable

import pytest

from optimizer_cases import BITWISE, CASES, Case, Options
from overlap import Bag, Setting, assert_same_run, step_bag
from pool import Ranks
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.hooks import zero_step
from zero_optim.probe.probe import probe

REFUSED_IN_PARTS = {"torch_optimizer.Lookahead", "torch_optimizer.MADGRAD"}  # they count their steps
SOME = [
    name
    for name in ("torch.optim.AdamW", "torch.optim.Muon", "torch.optim.SparseAdam", "torch_optimizer.AccSGD")
    if name in BITWISE
]


def setting_of(case: Case, options: Options, wrapper: str) -> Setting:
    return Setting(
        wrapper,
        lambda: Bag(case.params(), sparse=case.feed == "sparse rows"),
        lambda model: ZeroRedundancyOptimizer(
            model.parameters(), case.optimizer_class, bucket_cap_mb=0.0005, **options
        ),
    )


def check_classes(wrapper: str, names: Iterable[str], steps: int) -> list[str]:
    refused = []
    for name in names:
        # Every set of options on PyTorch's DDP, every class on both.
        for options in CASES[name].options if wrapper == "torch" else CASES[name].options[-1:]:
            setting = setting_of(CASES[name], options, wrapper)
            if not probe(CASES[name].optimizer_class, options).steppable_in_parts:
                refused.append(name)
                check_refusal(setting, name)
                continue
            moves = CASES[name].feed != "sparse rows"
            assert_same_run(setting, step_bag, steps, moves=moves, where=(name, options))
    return refused


def check_refusal(setting: Setting, name: str) -> None:
    optimizer = setting.optimizer(setting.model())
    with pytest.raises(
        ValueError,
        match=rf"(?i){name.rsplit('.', maxsplit=1)[-1]} cannot be stepped during .*: stepped in parts, ",
    ):
        zero_step(optimizer)


@pytest.mark.parametrize("wrapper", [pytest.param("torch", marks=pytest.mark.exhaustive), "ours"])
@pytest.mark.slow
def test_every_class_gives_the_same_bits_or_is_refused_with_the_reason(ranks2: Ranks, wrapper: str) -> None:
    for refused in ranks2.run(check_classes, wrapper, tuple(BITWISE), 8, timeout=600):
        assert set(refused) == REFUSED_IN_PARTS


def test_classes_that_count_their_steps_are_refused_with_the_reason(ranks2: Ranks) -> None:
    for refused in ranks2.run(check_classes, "torch", tuple(REFUSED_IN_PARTS), 0):
        assert set(refused) == REFUSED_IN_PARTS


@pytest.mark.parametrize("wrapper", ["torch", "ours"])
def test_some_classes_give_the_same_bits_on_four_ranks(ranks4: Ranks, wrapper: str) -> None:
    ranks4.run(check_classes, wrapper, SOME, 6)
