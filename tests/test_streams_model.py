"""The model of streams finds what no event orders, and nothing else.

Whole runs, in `test_streams_runs.py`, show more of it: that waits, `record_use` and collectives order what
they should, and that memory which is dropped too early and two communicators at once are found.
"""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from modelled import Race, StreamsModel, modelled_streams
from pool import on_ranks
from zero_optim.compat import streams

CPU = torch.device("cpu")


def writes(tensor: Tensor) -> None:
    tensor.add_(1)


def reads(tensor: Tensor) -> Tensor:
    return tensor * 2


def on_side(model: StreamsModel, function: Callable[[Tensor], object], tensor: Tensor) -> None:
    """Call a function on another stream, which waits for nothing."""
    with model.using(model.new_stream()):
        function(tensor)


def read_elsewhere(model: StreamsModel, value: Tensor) -> None:
    writes(value)
    on_side(model, reads, value)


def write_before_the_event(model: StreamsModel, value: Tensor) -> None:
    writes(value)
    event = streams.recorded_event(CPU)
    with model.using(model.new_stream()):
        streams.wait_for_event(CPU, event)
        reads(value)


def drop(model: StreamsModel, _: Tensor, keep: Callable[[Tensor], object] = Tensor.size) -> None:
    """Use memory on a stream, and drop it where that stream has surely not got there yet."""
    made, side = torch.ones(4, device=CPU), model.new_stream()
    side.wait_stream(model.current_stream)
    with model.using(side):
        reads(made)
        keep(made)
    del made


def drop_what_is_marked(model: StreamsModel, value: Tensor) -> None:
    drop(model, value, streams.record_use)


def read_a_future_unasked(model: StreamsModel, _: Tensor) -> object:
    future = streams.future_on(CPU)
    with model.using(model.new_stream()):
        future.set_result(torch.ones(4, device=CPU))
    reads(future.value())
    return future


# A program, and what either side of its one race is, or goes through; None where there is none.
PROGRAMS: dict[Callable[[StreamsModel, Tensor], object], tuple[str, str] | None] = {
    read_elsewhere: ("writes", "reads"),
    write_before_the_event: None,
    drop: ("reads", "drop"),
    drop_what_is_marked: None,
    read_a_future_unasked: ("read_a_future_unasked", "reads"),
}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_race_is_found_with_both_stacks_and_nothing_else(
    program: Callable[[StreamsModel, Tensor], object],
) -> None:
    sides, value = PROGRAMS[program], torch.ones(16)
    with modelled_streams(checks=False) as model:
        kept = program(model, value)
        races = model.settle()
        del kept
    if sides is None:
        assert not races, "\n".join(map(str, races))
        return
    assert any(is_between(race, *sides) for race in races), "\n".join(map(str, races))
    assert len(races) == 1, "\n".join(map(str, races))
    assert "test_streams_model.py" in str(races[0])


def is_between(race: Race, *names: str) -> bool:
    sides = zip((race.first, race.second), names, strict=True)
    return all(
        name in side.what or name in side.by.name or name in side.stack.functions for side, name in sides
    )


@on_ranks(2)
def test_collectives_that_ranks_start_in_other_orders_are_found() -> None:
    """A rank starts something else than the other one, which has come before it."""
    rank, value = dist.get_rank(), torch.ones(4)
    with modelled_streams() as model:
        dist.all_reduce(value)
        if rank == 0:
            model.communicators._tell("all_reduce of 4 elements", dist.group.WORLD)
        dist.barrier()
        if rank == 1:
            with pytest.raises(AssertionError, match=r"(?s)rank 1 broadcast of 4 .*on rank 0 all_reduce"):
                model.communicators._tell("broadcast of 4 elements", dist.group.WORLD)
