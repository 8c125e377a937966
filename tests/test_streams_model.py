"""The model of streams finds what no event orders, and nothing else.

Whole runs, in `test_streams_runs.py`, show more of it: that waits, `record_use` and collectives order what
they should, and that memory which is dropped too early and two communicators at once are found.
"""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from modelled import Race, StreamsModel, modelled_streams
from pool import Ranks, on_ranks
from zero_optim.compat import streams
from zero_optim.compat.streams import HostCopy

CPU = torch.device("cpu")


def writes(tensor: Tensor) -> None:
    tensor.add_(1)


def reads(tensor: Tensor) -> Tensor:
    return tensor * 2


def on_side(model: StreamsModel, function: Callable[[Tensor], object], tensor: Tensor) -> None:
    """Call a function on another stream, which waits for nothing."""
    with model.using(model.new_stream()):
        function(tensor)


def through_dlpack(tensor: Tensor) -> Tensor:
    """Another storage over the same memory."""
    return torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(tensor))


# ---------------------------------------------------------------------- small programs


def read_elsewhere(model: StreamsModel, value: Tensor) -> None:
    writes(value)
    on_side(model, reads, value)


def write_while_another_reads(model: StreamsModel, value: Tensor) -> None:
    on_side(model, reads, value)
    writes(value)


def write_after_the_event(model: StreamsModel, value: Tensor) -> None:
    event = streams.recorded_event(CPU)
    writes(value)
    with model.using(model.new_stream()):
        streams.wait_for_event(CPU, event)
        reads(value)


def write_before_the_event(model: StreamsModel, value: Tensor) -> None:
    writes(value)
    event = streams.recorded_event(CPU)
    with model.using(model.new_stream()):
        streams.wait_for_event(CPU, event)
        reads(value)


def read_beside_reads(model: StreamsModel, value: Tensor) -> None:
    reads(value)
    on_side(model, reads, value)


def use_other_places(model: StreamsModel, value: Tensor) -> None:
    matrix = value[8:].view(2, 4)
    writes(value[:4])
    writes(matrix[:, :2])
    on_side(model, reads, value[4:8])
    on_side(model, reads, matrix[:, 2:])


def use_the_same_place(model: StreamsModel, value: Tensor) -> None:
    writes(value[:4])
    on_side(model, reads, value[3:5])


def use_two_storages(model: StreamsModel, value: Tensor) -> None:
    alias = through_dlpack(value[4:])
    assert alias.untyped_storage().data_ptr() != value.untyped_storage().data_ptr()
    writes(value)
    on_side(model, reads, alias)


def go_backward_after_a_write(model: StreamsModel, value: Tensor) -> None:
    value.requires_grad_()
    loss = (value * value).sum()
    on_side(model, writes, value.data)
    loss.backward()


def read_what_a_hook_copied(model: StreamsModel, value: Tensor) -> object:
    flags = list[Tensor]()

    def hook(_: Tensor) -> None:
        flags.append(torch.tensor([1.0, 2.0]).pin_memory().to(CPU, non_blocking=True))

    value.requires_grad_().register_post_accumulate_grad_hook(hook)
    value.sum().backward()
    assert not model.settle()
    on_side(model, reads, flags[0])
    return flags


def drop(model: StreamsModel, _: Tensor, keep: Callable[[Tensor], object] = Tensor.size) -> None:
    """Use memory on a stream, and drop it where that stream has surely not got there yet."""
    made, side = torch.ones(4, device=CPU), model.new_stream()
    side.wait_stream(model.current_stream)
    with model.using(side):
        reads(made)
        keep(made)
    del made


def drop_what_dlpack_made(model: StreamsModel, value: Tensor) -> None:
    drop(model, value, lambda made: streams.record_use(through_dlpack(made[:2])))


def drop_what_is_marked(model: StreamsModel, value: Tensor) -> None:
    drop(model, value, streams.record_use)


def drop_what_was_waited_for(model: StreamsModel, value: Tensor) -> None:
    main = model.current_stream
    drop(model, value, lambda _: main.wait_stream(model.current_stream))


def read_on_the_cpu_too_early(model: StreamsModel, value: Tensor) -> object:
    copy = HostCopy(value)
    copy._events = []
    copy.read().tolist()
    return copy


def read_after_the_cpu_has_waited(model: StreamsModel, value: Tensor) -> None:
    writes(value)
    model.current_stream.synchronize()
    on_side(model, reads, value)


def read_a_future_unasked(model: StreamsModel, _: Tensor) -> object:
    future = streams.future_on(CPU)
    with model.using(model.new_stream()):
        future.set_result(torch.ones(4, device=CPU))
    reads(future.value())
    return future


def read_on_a_thread(model: StreamsModel, value: Tensor) -> None:
    """A thread begins with the default stream."""
    with model.using(model.new_stream()):
        writes(value)
        thread = threading.Thread(target=reads, args=(value,))
        thread.start()
        thread.join()


# A program, and what either side of its one race is, or goes through; None where there is none.
PROGRAMS: dict[Callable[[StreamsModel, Tensor], object], tuple[str, str] | None] = {
    read_elsewhere: ("writes", "reads"),
    write_while_another_reads: ("reads", "writes"),
    write_after_the_event: ("writes", "reads"),
    write_before_the_event: None,
    read_beside_reads: None,
    use_other_places: None,
    use_the_same_place: ("writes", "reads"),
    use_two_storages: ("writes", "reads"),
    go_backward_after_a_write: ("writes", "mul"),
    read_what_a_hook_copied: ("hook", "reads"),
    drop: ("reads", "drop"),
    drop_what_dlpack_made: ("reads", "drop"),
    drop_what_is_marked: None,
    drop_what_was_waited_for: None,
    read_on_the_cpu_too_early: ("read_on_the_cpu_too_early", "the CPU"),
    read_after_the_cpu_has_waited: None,
    read_a_future_unasked: ("read_a_future_unasked", "reads"),
    read_on_a_thread: ("writes", "reads"),
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
    assert len(races) == 1 or program is go_backward_after_a_write, "\n".join(map(str, races))
    assert "test_streams_model.py" in str(races[0])


def is_between(race: Race, *names: str) -> bool:
    sides = zip((race.first, race.second), names, strict=True)
    return all(
        name in side.what or name in side.by.name or name in side.stack.functions for side, name in sides
    )


# ---------------------------------------------------------------------- what else it models


def test_a_part_of_a_model_on_another_stream_is_ordered_in_both_passes() -> None:
    weight, value = torch.ones(4, requires_grad=True), torch.ones(4, requires_grad=True)
    seen: list[object] = []
    with modelled_streams() as model:
        side, main = model.new_stream(), model.current_stream
        weight.register_post_accumulate_grad_hook(lambda _: seen.append(model.current_stream))
        value.register_post_accumulate_grad_hook(lambda _: seen.append(model.current_stream))
        there = model.on_stream(lambda given: given * weight, side)
        there(value * 1).sum().backward()
        assert seen == [side, main]
        assert model.current_stream is main


def test_memory_of_a_storage_that_is_emptied_is_given_back_then() -> None:
    for keep, count in ((streams.record_use, 0), (lambda _: None, 1)):
        with modelled_streams(checks=False) as model:
            value, side = torch.ones(4, device=CPU), model.new_stream()
            storage = value.untyped_storage()
            side.wait_stream(model.current_stream)
            with model.using(side):
                reads(value)
                keep(value)
            storage.resize_(0)
            assert len(model.settle()) == count
            storage.resize_(16)  # other memory, perhaps at the same address
            writes(value)
            del value, storage
            assert len(model.settle()) == count


def test_a_host_copy_that_is_waited_for_is_right_and_waits_for_no_more() -> None:
    value = torch.ones(4)
    with modelled_streams() as model:
        writes(value)
        copy = HostCopy(value)
        writes(value)
        assert copy.read().tolist() == [2.0] * 4
        assert model.num_host_waits == 0
        assert value.sum().item() == 12.0
        assert model.num_host_waits == 1


def test_tensors_over_memory_of_python_are_on_the_host() -> None:
    with modelled_streams() as model:
        made = (torch.frombuffer(bytearray(8), dtype=torch.uint8), torch.from_numpy(np.zeros(2)))
        assert [model.kind_of(tensor) for tensor in made] == ["host", "host"]


def test_a_future_orders_streams_and_its_callbacks() -> None:
    with modelled_streams() as model:
        future = streams.future_on(CPU)
        child = future.then(lambda done: reads(done.value()))
        with model.using(model.new_stream()):
            value = torch.full((4,), 2.0, device=CPU)
            writes(value)
            future.set_result(value)
            del value
        assert reads(child.wait()).tolist() == [12.0] * 4


def test_an_error_in_a_callback_comes_out_of_its_future() -> None:
    def fail(_: Any) -> None:
        raise ValueError("no")

    with modelled_streams():
        future = streams.future_on(CPU)
        child = future.then(fail).then(torch.futures.Future.value)
        future.set_result(torch.ones(1))
        with pytest.raises(ValueError, match="no"):
            child.wait()


def sum_read_too_early(waits: bool) -> list[str]:
    value = torch.ones(4)
    with modelled_streams(checks=False) as model:
        work = dist.all_reduce(value, async_op=True)
        assert isinstance(work, dist.Work)
        if waits:
            work.wait()
        assert reads(value).tolist() == [4.0] * 4
        del value
        return [str(race) for race in model.settle()]


def test_a_collective_ends_when_its_handle_was_waited_for(ranks2: Ranks) -> None:
    for waits in (True, False):
        for found in ranks2.run(sum_read_too_early, waits):
            assert len(found) == (not waits), found


@on_ranks(2)
def test_collectives_move_their_data_and_are_ordered() -> None:
    """Every collective that the library uses, its data right and its order known."""
    rank, group = dist.get_rank(), dist.group.WORLD
    with modelled_streams() as model:
        side = model.new_stream()
        mine = torch.full((3,), float(rank), device=CPU)
        parts = [torch.empty(3, device=CPU) for _ in range(2)]
        side.wait_stream(model.current_stream)
        with model.using(side):
            dist.all_gather(parts, mine)
            future = dist.broadcast(mine, 1, async_op=True).get_future()  # type: ignore[union-attr]
        value = future.then(lambda done: done.value()[0] + 1).wait()
        dist.all_to_all(parts, [value, value])
        works = [dist.isend(mine, 1 - rank, group), dist.irecv(parts[0], 1 - rank, group)]
        for work in works:
            assert work is not None
            work.wait()
        assert torch.stack([*parts, mine]).tolist() == [[1.0] * 3, [2.0] * 3, [1.0] * 3]


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
