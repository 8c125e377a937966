"""Chained collectives are started in one order on every rank, whatever the timing."""

import itertools
import random
import threading
import time
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pool import Ranks
from test_hooks_bucket import FakeBucket, grads_of, make_params
from zero_optim.hooks import PowerSGDState, batched_powerSGD_hook, low_rank, make_hook, powerSGD_hook
from zero_optim.hooks.exchange import start_average, start_sum
from zero_optim.hooks.order import LaterStage, Turnstile

NUM_BUCKETS = 24
NUM_STEPS = 3

Held = tuple[torch.futures.Future[torch.Tensor], torch.futures.Future[torch.Tensor]]


@pytest.mark.parametrize("arrival", list(itertools.permutations(range(4))))
def test_a_turnstile_keeps_the_order_of_the_turns(arrival: tuple[int, ...]) -> None:
    turnstile, passed = Turnstile(), []
    assert [turnstile.draw() for _ in range(4)] == [0, 1, 2, 3]
    for turn in arrival:
        turnstile.enter(turn, partial(passed.append, turn))
        assert passed == list(range(len(passed)))  # in order, at any moment
    assert passed == [0, 1, 2, 3]


def test_a_turnstile_is_entered_from_inside_and_by_many_threads() -> None:
    turnstile, passed = Turnstile(), []
    turns = [turnstile.draw() for _ in range(200)]
    inner = turnstile.draw()

    def last_of_the_outer() -> None:
        passed.append(199)
        turnstile.enter(inner, partial(passed.append, inner))

    def enter(turn: int) -> None:
        turnstile.enter(turn, last_of_the_outer if turn == 199 else partial(passed.append, turn))

    random.Random(0).shuffle(turns)
    threads = [threading.Thread(target=enter, args=(turn,)) for turn in turns]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert passed == list(range(201))


class Shuffled:
    """Starts averages, but completes those of a step in an order of this rank's own, once all are started.

    Args:
        num_threads: how many threads complete them, side by side. One keeps to the order.
    """

    def __init__(self, num_threads: int) -> None:
        self.random = random.Random(dist.get_rank())
        self.num_threads = num_threads
        self.held: list[Held] = []

    def __call__(self, group: dist.ProcessGroup, tensor: Tensor) -> torch.futures.Future[torch.Tensor]:
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        self.held.append((start_average(group, tensor), done))
        if len(self.held) == NUM_BUCKETS:
            held, self.held = self.held, []
            self.random.shuffle(held)
            for first in range(self.num_threads):
                threading.Thread(target=complete, args=(held[first :: self.num_threads],)).start()
        return done


def complete(held: list[Held]) -> None:
    for future, done in held:
        done.set_result(future.wait())


def check_shuffled(hook: Any, keep_order: bool) -> list[bool]:
    """Buckets of equal shapes, so that a swap gives wrong numbers and not an error."""
    rank, size = dist.get_rank(), dist.get_world_size()
    params = [make_params(((6, 4), (3,))) for _ in range(NUM_BUCKETS)]
    options: dict[str, Any] = {
        "matrix_approximation_rank": 8,
        "min_compression_rate": 0.01,
        "start_powerSGD_iter": 0,
    }
    state = PowerSGDState(**options)
    low_rank.start_average = Shuffled(4 if keep_order else 1)  # type: ignore[assignment]
    enter = Turnstile.enter
    if not keep_order:
        Turnstile.enter = lambda self, turn, function: function()  # type: ignore[method-assign]
    right = []
    try:
        for step in range(NUM_STEPS):
            futures = []
            for index, mine in enumerate(params):
                grads = grads_of(mine, rank, 100 * step + index)
                futures.append(hook(state, FakeBucket(mine, grads, index, index == NUM_BUCKETS - 1)))
                # The reducer and the user go on using the group meanwhile, each rank when it gets there.
                if index % 5 == rank:
                    time.sleep(0.002)
                other = start_sum(dist.group.WORLD, torch.full((5,), float(rank + index)))  # type: ignore[arg-type]
                futures.append(other)
            for index, mine in enumerate(params):
                result, other_result = futures[2 * index].wait(), futures[2 * index + 1].wait()
                flats = [
                    torch.cat([g.reshape(-1) for g in grads_of(mine, r, 100 * step + index)])
                    for r in range(size)
                ]
                expected = torch.stack(flats).mean(0)
                right.append(
                    torch.allclose(result, expected, atol=1e-5)
                    and torch.equal(other_result, torch.full((5,), float(sum(range(size)) + size * index)))
                )
    finally:
        low_rank.start_average = start_average
        Turnstile.enter = enter  # type: ignore[method-assign]
    return right


@pytest.mark.parametrize("hook", [powerSGD_hook, batched_powerSGD_hook])
def test_chained_collectives_are_right_in_whatever_order_the_first_ones_end(ranks4: Ranks, hook: Any) -> None:
    for right in ranks4.run(check_shuffled, hook, True):
        assert right == [True] * NUM_BUCKETS * NUM_STEPS


def test_the_test_with_another_order_on_each_rank_sees_collectives_out_of_order(ranks4: Ranks) -> None:
    assert not all(all(right) for right in ranks4.run(check_shuffled, powerSGD_hook, False))


def check_failure() -> list[str]:
    """A bucket whose preparation fails gives its error, and those behind it go on."""
    group = dist.group.WORLD
    assert group is not None
    stage = LaterStage.beside(group, torch.device("cpu"))
    messages = []

    def follow(number: int, failing: str) -> torch.futures.Future[torch.Tensor]:
        tensor = torch.full((3,), float(number))

        def at(place: str, value: Any) -> Any:
            if failing == place:
                raise ArithmeticError(f"bucket {number} at {place}")
            return value() if callable(value) else value

        return stage.follow(
            start_sum(group, tensor),
            torch.device("cpu"),
            lambda first: at("prepare", first.value),
            lambda later: at("start", lambda: start_sum(later, tensor)),
            lambda second: at("finish", second.value),
        )

    futures = [
        follow(number, failing) for number, failing in enumerate(["", "prepare", "start", "finish", ""])
    ]
    for number, future in enumerate(futures):
        try:
            messages.append(str(float(future.wait()[0]) == number * dist.get_world_size() ** 2))
        except RuntimeError as error:
            messages.append(str(error).split("\n", maxsplit=1)[0])
    return messages


def test_what_fails_in_a_chain_is_raised_by_its_future_and_holds_up_nobody(ranks2: Ranks) -> None:
    for messages in ranks2.run(check_failure):
        expected = ["True", "bucket 1 at prepare", "bucket 2 at start", "bucket 3 at finish", "True"]
        assert all(want in got for want, got in zip(expected, messages, strict=True)), messages


def check_let_go(name: str) -> None:
    """The groups end when this returns, before the threads that ran the callbacks are done with them."""
    params = make_params(((6, 4), (3,)))
    state, hook = make_hook(name, log=True)
    set_result = torch.futures.Future.set_result

    def slowly(future: torch.futures.Future[torch.Tensor], result: Tensor) -> None:
        set_result(future, result)
        time.sleep(0.05)  # the main thread goes on meanwhile

    torch.futures.Future.set_result = slowly  # type: ignore[method-assign,assignment]
    try:
        hook(state, FakeBucket(params, grads_of(params, dist.get_rank()))).wait()
    finally:
        torch.futures.Future.set_result = set_result  # type: ignore[method-assign]


@pytest.mark.parametrize("name", ["fp16", "quantize_tensor", "power_sgd", "top_k"])
def test_groups_may_be_let_go_as_soon_as_a_bucket_is_done(ranks2: Ranks, name: str) -> None:
    for _ in range(3):  # the next call sees whether the processes are still there
        ranks2.run(check_let_go, name)
