"""Gradients that nobody would reduce: they are reduced, or refused; no rank trains with its own."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from pool import on_ranks
from zero_optim import RankMismatchError, ZeroRedundancyOptimizer
from zero_optim.ddp import DistributedDataParallel, FullyShardedDataParallel, ShardedDataParallel, unsharded
from zero_optim.hooks import zero_step


def made() -> tuple[nn.Sequential, ZeroRedundancyOptimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
    return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=1.0)


def in_full(model: nn.Module, optimizer: ZeroRedundancyOptimizer) -> nn.Module:
    return FullyShardedDataParallel(model, optimizer, units=[*model.children()])


WRAPPERS: dict[str, Callable[[nn.Module, ZeroRedundancyOptimizer], nn.Module]] = {
    "gradients": ShardedDataParallel,
    "parameters": in_full,
}


def batch(rank: int) -> Tensor:
    return torch.full((2, 8), 1.0 + rank)


@on_ranks(2)
@pytest.mark.parametrize("kind", WRAPPERS)
def test_what_was_frozen_while_it_was_wrapped_cannot_be_trained_later(kind: str) -> None:
    model, optimizer = made()
    model[0].requires_grad_(False)
    wrapped = WRAPPERS[kind](model, optimizer)
    for unfrozen in (False, True, False):
        model[0].requires_grad_(unfrozen)
        if unfrozen:
            with pytest.raises(RuntimeError, match=r"^0\.0\.weight, 0\.0\.bias did not require"):
                wrapped(batch(dist.get_rank()))
            with torch.no_grad():  # trains nothing
                wrapped(batch(dist.get_rank()))
        else:
            wrapped(batch(dist.get_rank())).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


@on_ranks(2)
@pytest.mark.parametrize("kind", WRAPPERS)
def test_a_pass_of_modules_called_by_themselves_is_reduced_from_the_first_on(kind: str) -> None:
    model, optimizer = made()
    kept = WRAPPERS[kind](model, optimizer)
    x = batch(dist.get_rank())
    for block in model:
        x = block(x)
    x.sum().backward()
    optimizer.step()
    expected = [param.detach().clone() for param in made()[0].parameters()]
    grads = []
    for rank in range(2):
        alone = made()[0]
        alone(batch(rank)).sum().backward()
        grads.append([param.grad for param in alone.parameters()])
    for number, (one, two) in enumerate(zip(*grads, strict=True)):
        expected[number] -= one / 2 + two / 2
    with unsharded(model) if kind == "parameters" else torch.no_grad():
        assert all(map(torch.equal, model.parameters(), expected))
    del kept


# ---------------------------------------------------------------------- DDP: gradients whole on every rank


def frozen_and_wrapped(kind: str) -> tuple[nn.Sequential, ZeroRedundancyOptimizer, nn.Module]:
    model, optimizer = made()
    model[0].requires_grad_(kind == "rebound")
    wrapped = DistributedDataParallel(model)
    if kind == "rebound":
        model[0].requires_grad_(False)
        optimizer.detach()
        wrapped.detach()
        optimizer.rebind()
        wrapped.rebind()
    if kind == "zero_step":
        wrapped.register_comm_hook(None, zero_step(optimizer))
    return model, optimizer, wrapped


@on_ranks(2)
@pytest.mark.parametrize("kind", ["rebound", "zero_step"])
def test_a_step_with_gradients_that_ddp_did_not_reduce_raises_on_every_rank(kind: str) -> None:
    model, optimizer, wrapped = frozen_and_wrapped(kind)
    for unfrozen in (False, True, False):
        model[0].requires_grad_(unfrozen)
        before = model[0][0].weight.detach().clone()
        wrapped(batch(dist.get_rank())).sum().backward()
        refused = pytest.raises(RankMismatchError, match=r"gradient of 0\.0\.weight.*did not require")
        with refused if unfrozen else nullcontext():
            optimizer.step()
        assert torch.equal(model[0][0].weight, before)
        optimizer.zero_grad()


@on_ranks(2)
@pytest.mark.parametrize("averages", [True, False])
def test_gradients_that_the_user_averages_are_stepped_with_and_others_are_not(averages: bool) -> None:
    model, optimizer, wrapped = frozen_and_wrapped("wrapped")
    model[0].requires_grad_(True)

    def closure() -> float:
        optimizer.zero_grad()
        loss = wrapped(batch(dist.get_rank())).sum()
        loss.backward()
        for param in model[0].parameters() if averages else ():
            dist.all_reduce(param.grad)
        return float(loss.detach())

    refused = pytest.raises(RankMismatchError, match="did not require a gradient")
    with nullcontext() if averages else refused:
        optimizer.step(closure)


@on_ranks(2)
def test_inside_join_unreduced_gradients_raise_on_joined_ranks() -> None:
    """Rank 1 has run out of inputs."""
    model, optimizer, wrapped = frozen_and_wrapped("zero_step")
    model[0].requires_grad_(True)

    def train() -> None:
        with Join([wrapped, optimizer]):
            for _ in range(1 - dist.get_rank()):
                wrapped(batch(0)).sum().backward()
                optimizer.step()

    with pytest.raises(RuntimeError, match="did not require a gradient"):
        train()


# ---------------------------------------------------------------------- passes that were not reduced

SITUATIONS: dict[str, Callable[[nn.Module, nn.Module], None]] = {}


def backward(wrapped: nn.Module, value: float) -> None:
    wrapped(torch.full((2, 8), value)).square().sum().backward()


def situation(function: Callable[[nn.Module, nn.Module], None]) -> Callable[[nn.Module, nn.Module], None]:
    SITUATIONS[function.__name__] = function
    return function


@situation
def all_under_no_sync(model: nn.Module, wrapped: nn.Module) -> None:
    with wrapped.no_sync():
        backward(wrapped, 1.0 + dist.get_rank())


@situation
def one_more_under_no_sync(model: nn.Module, wrapped: nn.Module) -> None:
    backward(wrapped, 1.0 + dist.get_rank())
    all_under_no_sync(model, wrapped)


@situation
def the_inner_module(model: nn.Module, wrapped: nn.Module) -> None:
    backward(model, 1.0 + dist.get_rank())


@situation
def sync_left_off(model: nn.Module, wrapped: nn.Module) -> None:
    wrapped.require_backward_grad_sync = False  # type: ignore[assignment]
    backward(wrapped, 1.0 + dist.get_rank())


def with_zero_step(model: nn.Module, optimizer: ZeroRedundancyOptimizer) -> nn.Module:
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(None, zero_step(optimizer))
    return wrapped


RECIPES: dict[str, Callable[[nn.Module, ZeroRedundancyOptimizer], nn.Module]] = {
    "DDP": lambda model, _: DistributedDataParallel(model),
    "zero_step": with_zero_step,
    "stage 2": ShardedDataParallel,
    "stage 2, local": lambda model, optimizer: ShardedDataParallel(model, optimizer, accumulate="local"),
    "stage 3": in_full,
    "stage 3, local": lambda model, optimizer: FullyShardedDataParallel(
        model, optimizer, units=[*model.children()], accumulate="local"
    ),
}
# Owners add up every pass; with sharded gradients modules that are called by themselves are reduced.
REDUCED = {(recipe, name) for recipe in ("stage 2", "stage 3") for name in SITUATIONS} - {
    ("stage 2", "sync_left_off"),
    ("stage 3", "sync_left_off"),
}
REDUCED |= {(recipe, "the_inner_module") for recipe in ("stage 2, local", "stage 3, local")}
REFUSED = r"not reduced|has been reduced|after the step had been taken"


def weights(model: nn.Module, recipe: str) -> list[Tensor]:
    with unsharded(model) if recipe.startswith("stage 3") else torch.no_grad():
        return [param.detach().clone() for param in model.parameters()]


@on_ranks(2)
@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_of_passes_that_were_not_reduced_are_not_stepped(recipe: str) -> None:
    for name, run in SITUATIONS.items():
        model, optimizer = made()
        wrapped = RECIPES[recipe](model, optimizer)
        before = weights(model, recipe)

        is_reduced = (recipe, name) in REDUCED
        with nullcontext() if is_reduced else pytest.raises(RuntimeError, match=REFUSED):
            run(model, wrapped)
            optimizer.step()
        if is_reduced:
            continue
        is_stepped = (recipe, name) == ("zero_step", "one_more_under_no_sync")  # in its first pass
        assert is_stepped or all(map(torch.equal, weights(model, recipe), before)), name


@on_ranks(2)
@pytest.mark.parametrize("kind", ["cleared", "averaged", "closure"])
def test_the_error_names_parameters_and_spares_gradients_that_are_equal_or_gone(kind: str) -> None:
    model, optimizer = made()
    wrapped = DistributedDataParallel(model)

    def closure() -> float:
        all_under_no_sync(model, wrapped)
        return 0.0

    if kind == "closure":
        with pytest.raises(RankMismatchError, match=r"gradient of 0\.0\.weight.*no_sync.*0\.0\.bias, 1\.0"):
            optimizer.step(closure)
        return
    closure()
    for param in model.parameters():
        if kind == "averaged":
            dist.all_reduce(param.grad)
        else:
            param.grad = None
    optimizer.step()


@on_ranks(2)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_parameter_of_the_optimizer_in_no_wrapper_is_averaged_by_the_user_or_refused(recipe: str) -> None:
    model, head = made()[0], nn.Linear(8, 2)
    params = [*model.named_parameters(), *head.named_parameters(prefix="head")]
    optimizer = ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=1.0)
    wrapped = RECIPES[recipe](model, optimizer)
    for averages in (True, False):
        head(wrapped(batch(dist.get_rank()))).sum().backward()
        for param in head.parameters() if averages else ():
            dist.all_reduce(param.grad)
        refused = r"gradient of head\.weight.*in no data-parallel wrapper"
        with nullcontext() if averages else pytest.raises(RankMismatchError, match=refused):
            optimizer.step()
        optimizer.zero_grad()


@on_ranks(2)
@pytest.mark.parametrize("recipe", ["DDP", "stage 2, local", "stage 3, local"])
def test_a_closure_may_hold_the_pass_that_reduces_what_was_accumulated_before(recipe: str) -> None:
    ended = []
    for is_inside in (True, False):
        model, optimizer = made()
        wrapped = RECIPES[recipe](model, optimizer)
        for _ in range(2):
            all_under_no_sync(model, wrapped)
            if is_inside:
                optimizer.step(partial(loss_of, wrapped))
            else:
                loss_of(wrapped)
                optimizer.step()
            optimizer.zero_grad()
        ended.append(weights(model, recipe))
    assert all(map(torch.equal, *ended))


def loss_of(wrapped: nn.Module) -> float:
    backward(wrapped, 2.0 + dist.get_rank())
    return 0.0


# ---------------------------------------------------------------------- wrappers that nobody can ask

UNDER_TORCH = {name: run for name, run in SITUATIONS.items() if name != "sync_left_off"}


@on_ranks(2)
@pytest.mark.parametrize("name", UNDER_TORCH)
def test_under_pytorchs_ddp_a_step_with_gradients_that_differ_raises_on_every_rank(name: str) -> None:
    model, optimizer = made()
    UNDER_TORCH[name](model, TorchDistributedDataParallel(model))
    with pytest.raises(RankMismatchError, match=r"different gradients in step\(\).*gradient of .*no_sync"):
        optimizer.step()


@on_ranks(2)
def test_a_parameter_in_no_wrapper_is_found_within_as_many_steps_as_there_are_parameters() -> None:
    model, head = made()[0], nn.Linear(8, 2)
    params = [*model.named_parameters(), *head.named_parameters(prefix="head")]
    optimizer = ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=1e-3)
    wrapped = TorchDistributedDataParallel(model)

    def train() -> None:
        for _ in params:
            head(wrapped(batch(dist.get_rank()))).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    with pytest.raises(RankMismatchError, match=r"gradient of head\."):
        train()


@on_ranks(2)
def test_gradients_on_owners_alone_and_those_that_differ_by_rounding_are_stepped() -> None:
    """As after a reduction to owners by hand, and on two kinds of accelerators."""
    _, optimizer = made()
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for param in params:
        is_owner = optimizer.owners()[param] == dist.get_rank()
        param.grad = torch.ones_like(param) if is_owner else None
    optimizer.step()
    for step in range(20):
        for param in params:
            param.grad = torch.full_like(param, 1.0 + 1e-6 * dist.get_rank())
        before = optimizer.metrics()
        optimizer.step()
        if step > 10:  # nothing is compared any more
            assert optimizer.metrics()["collectives/agree"] == 0, before
