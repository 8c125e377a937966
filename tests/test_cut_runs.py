"""Parameters that are cut: several ranks own rows of one, and the run has the bits of the unsharded run."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from cuts import SHAPES, cut_over, cut_pair, cutting
from overlap import Setting, assert_same_run
from own_classes import Small
from pool import on_ranks
from training import assert_same_bits, assert_same_state, make_params, params_of, set_grads, train_both, whole
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.plan.pieces import rows_of
from zero_optim.step.averages import EMA

# ---------------------------------------------------------------------- what happens between two steps


class Changing(torch.optim.AdamW):
    """Gives what it steps new memory at each step, and has methods that change parameters and state."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for param in params_of(self):
            param.data = param.data.clone()

    @torch.no_grad()
    def double(self) -> None:
        for param in params_of(self):
            param.mul_(2)

    def restart(self) -> None:
        self.state = defaultdict(dict)


def replace_data(optimizer: Any) -> None:
    for param in params_of(optimizer):
        param.data = param.data * 2


def change_strides(optimizer: Any) -> None:
    for param in params_of(optimizer)[2:3]:
        param.data = param.data.to(memory_format=torch.channels_last) * 2


@torch.no_grad()
def change_in_place(optimizer: Any) -> None:
    for param in params_of(optimizer):
        param.mul_(0.5)


def share(optimizer: Any) -> None:
    for param in params_of(optimizer):
        param.share_memory_()
        assert param.is_shared()


def add_group(optimizer: Any) -> None:
    extra = make_params(((64, 4), (5,)), seed=5)
    with cutting():
        optimizer.add_param_group({"params": extra, "lr": 0.1})
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        assert len(optimizer.pieces()[extra[0]]) == 2


def owned(optimizer: Optimizer) -> list[Tensor]:
    return [param for param in params_of(optimizer) if param in optimizer.state]


def doubled(entries: dict[str, Any]) -> dict[str, Any]:
    return {**entries, "exp_avg": entries["exp_avg"] * 2}


def for_each(change: Callable[[Any, Tensor], object]) -> Callable[[Any], None]:
    """Change the optimizer's state, for each parameter of which it has some."""

    def change_all(optimizer: Any) -> None:
        for param in owned(optimizer):
            change(optimizer.state, param)

    return change_all


def set_entries(state: Any, param: Tensor) -> None:
    state[param]["exp_avg"] = torch.zeros_like(state[param]["exp_avg"])
    state[param]["step"] = torch.tensor(5.0)


def step_with_another_state(optimizer: Any) -> None:
    aside = optimizer.state
    optimizer.state = defaultdict(dict)
    set_grads(params_of(optimizer), 9)
    optimizer.step()
    optimizer.state = aside


def assign_doubled(optimizer: Any) -> None:
    optimizer.state = {param: doubled(entries) for param, entries in optimizer.state.items()}


DATA: dict[str, Callable[[Any], object]] = {
    "data is replaced": replace_data,
    "strides change": change_strides,
    "values change in place": change_in_place,
    "memory is shared": share,
    "the class doubles them": lambda optimizer: optimizer.double(),
}
RESTARTS: dict[str, Callable[[Any], object]] = {
    "clear": lambda optimizer: optimizer.state.clear(),
    "assign empty": lambda optimizer: setattr(optimizer, "state", defaultdict(dict)),
}
STATE: dict[str, Callable[[Any], object]] = {
    **RESTARTS,
    "set entries": for_each(set_entries),
    "delete each": for_each(lambda state, param: state.__delitem__(param)),
    "set others": for_each(lambda state, param: state.__setitem__(param, doubled(state[param]))),
    "assign a dict": assign_doubled,
    "another state for a step": step_with_another_state,
    "the class restarts": lambda optimizer: optimizer.restart(),
    "a group is added": add_group,
}


def assert_same_rows(plain: Optimizer, sharded: ZeroRedundancyOptimizer) -> None:
    """Compare the state that this rank owns with its rows of the unsharded state, bit for bit."""
    rank = dist.get_rank()
    for param, other in zip(params_of(sharded), params_of(plain), strict=True):
        piece = next((piece for piece in sharded.pieces()[param] if piece.owner == rank), None)
        assert (piece is None) == (param not in sharded.state)
        if piece is not None:
            assert [key for key in sharded.state[param] if key != EMA] == list(plain.state[other])
            for key, value in plain.state[other].items():
                expected = rows_of(value, piece) if value.shape == other.shape else value
                assert torch.equal(sharded.state[param][key], expected), key


@on_ranks(2)
@pytest.mark.parametrize("event", [*DATA, *STATE])
def test_what_happens_between_steps_does_what_it_does_to_torch_optim(event: str) -> None:
    change = {**DATA, **STATE}[event]
    optimizer_class = Changing if event.startswith("the class") else torch.optim.AdamW
    averages = {"ema_decay": 0.5} if event in DATA else {}
    for view in (True, False):
        params = [*make_params(SHAPES), *make_params(((2, 64), (1, 64)), seed=2)]  # also pieces of one row
        plain, sharded = cut_pair(params, optimizer_class, parameters_as_bucket_view=view, **averages)
        train_both(plain, sharded, 2)
        for optimizer in (plain, sharded):
            change(optimizer)
        assert_same_bits(params_of(sharded), params_of(plain))
        train_both(plain, sharded, 2, first=2)
        sharded.gather_parameters()
        assert_same_bits(params_of(sharded), params_of(plain))
        assert_same_rows(plain, sharded)
        if not averages:
            assert_same_state(whole(sharded), plain.state_dict())


# ---------------------- cut parameters stepped during the backward pass


class AddsToGradients(Small):
    """SGD with weight decay, which it adds to the gradients themselves."""

    def update(self, p: Any, group: dict[str, Any]) -> None:
        p.grad.add_(p, alpha=0.1)
        super().update(p, group)


def in_place(model: nn.Module) -> ZeroRedundancyOptimizer:
    """Steps need copies of the gradients."""
    return cut_over(model.parameters(), AddsToGradients, cap=0.001, lr=0.01)


def one_row(model: nn.Module) -> ZeroRedundancyOptimizer:
    return cut_over(model.parameters(), cap=1.0, lr=0.01)


@on_ranks(2)
@pytest.mark.parametrize("optimizer", [in_place, one_row])
def test_stepping_cut_parameters_in_backward_gives_the_same_bits(optimizer: Any) -> None:
    """With a class that changes gradients in place, and with one row for each rank."""
    assert_same_run(Setting("ours", optimizer=optimizer), steps=4)
