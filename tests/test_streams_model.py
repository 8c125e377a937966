"""The model of streams finds what no event orders, and nothing else."""

import threading
from collections.abc import Callable
from contextlib import ExitStack

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


def only(model: StreamsModel) -> Race:
    """The one race that was found."""
    races = model.settle()
    assert len(races) == 1, "\n".join(map(str, races))
    return races[0]


def writes(tensor: Tensor) -> None:
    tensor.add_(1)


def reads(tensor: Tensor) -> Tensor:
    return tensor * 2


def test_a_read_on_another_stream_that_waits_for_nothing_is_found_with_both_stacks() -> None:
    value = torch.ones(4)
    with modelled_streams(checks=False) as model:
        writes(value)
        with model.using(model.new_stream()):
            reads(value)
        race = only(model)
    assert "writes" in race.first.stack.functions
    assert "reads" in race.second.stack.functions
    assert race.first.writes
    assert not race.second.writes
    assert "test_streams_model.py" in str(race)


def test_an_event_orders_a_read() -> None:
    value = torch.ones(4)
    with modelled_streams() as model:
        writes(value)
        event = streams.recorded_event(CPU)
        with model.using(model.new_stream()):
            streams.wait_for_event(CPU, event)
            reads(value)


def test_an_event_orders_nothing_that_comes_after_it_was_recorded() -> None:
    value = torch.ones(4)
    with modelled_streams(checks=False) as model:
        event = streams.recorded_event(CPU)
        writes(value)
        with model.using(model.new_stream()):
            streams.wait_for_event(CPU, event)
            reads(value)
        assert "writes" in only(model).first.stack.functions


def test_a_write_while_another_stream_reads_is_found() -> None:
    value = torch.ones(4)
    with modelled_streams(checks=False) as model:
        with model.using(model.new_stream()):
            reads(value)
        writes(value)
        race = only(model)
    assert not race.first.writes
    assert race.second.writes


def test_reads_beside_each_other_are_no_race() -> None:
    value = torch.ones(4)
    with modelled_streams() as model:
        reads(value)
        with model.using(model.new_stream()):
            reads(value)


def test_other_places_of_one_tensor_do_not_disturb_each_other_and_the_same_place_does() -> None:
    flat = torch.ones(8)
    matrix = torch.ones(4, 4)
    with modelled_streams(checks=False) as model:
        side = model.new_stream()
        writes(flat[:4])
        writes(matrix[:, :2])
        with model.using(side):
            reads(flat[4:])
            reads(matrix[:, 2:])
        assert not model.settle()
        with model.using(side):
            reads(flat[3:5])
        only(model)


def test_two_storages_over_the_same_memory_are_one_memory() -> None:
    flat = torch.ones(8)
    alias = torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(flat[4:]))
    assert alias.untyped_storage().data_ptr() != flat.untyped_storage().data_ptr()
    with modelled_streams(checks=False) as model:
        writes(flat)
        with model.using(model.new_stream()):
            reads(alias)
        only(model)


def test_operators_of_a_backward_pass_are_seen() -> None:
    weight = torch.ones(4, requires_grad=True)
    with modelled_streams(checks=False) as model:
        loss = (weight * weight).sum()
        with model.using(model.new_stream()):
            writes(weight.data)
        loss.backward()
        assert any("mul" in race.second.what and not race.second.writes for race in model.settle())


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


def dropped(model: StreamsModel, keep: Callable[[Tensor], None]) -> None:
    """Use memory on a stream, and drop it where that stream has surely not got there yet."""
    value = torch.ones(4, device=CPU)
    event = streams.recorded_event(CPU)
    with model.using(model.new_stream()):
        streams.wait_for_event(CPU, event)
        reads(value)
        keep(value)
    del value


def test_memory_that_is_dropped_while_another_stream_uses_it_is_found() -> None:
    with modelled_streams(checks=False) as model:
        dropped(model, lambda _: None)
        race = only(model)
    assert "used again" in race.what
    assert "reads" in race.first.stack.functions
    assert "dropped" in race.second.stack.functions


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


def test_record_use_keeps_memory() -> None:
    with modelled_streams() as model:
        dropped(model, streams.record_use)


def test_record_use_does_nothing_for_memory_that_dlpack_made() -> None:
    def keep(value: Tensor) -> None:
        streams.record_use(torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(value[:2])))

    with modelled_streams(checks=False) as model:
        dropped(model, keep)
        only(model)


def test_memory_that_its_own_stream_waits_for_may_be_dropped() -> None:
    with modelled_streams() as model:
        value, side = torch.ones(4, device=CPU), model.new_stream()
        side.wait_stream(model.current_stream)
        with model.using(side):
            reads(value)
        model.current_stream.wait_stream(side)
        del value


def test_a_value_that_the_cpu_reads_before_its_copy_has_come_is_found() -> None:
    value = torch.ones(4)
    with modelled_streams(checks=False) as model:
        copy = HostCopy(value)
        copy._events = []
        copy.read().tolist()
        assert "the CPU" in only(model).second.by.name


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


def test_what_the_cpu_has_waited_for_is_ordered() -> None:
    value = torch.ones(4)
    with modelled_streams() as model:
        writes(value)
        model.current_stream.synchronize()
        with model.using(model.new_stream()):
            reads(value)


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


def test_a_value_of_a_future_that_nobody_waited_for_is_found() -> None:
    with modelled_streams(checks=False) as model:
        future = streams.future_on(CPU)
        with model.using(model.new_stream()):
            future.set_result(torch.ones(4, device=CPU))
        reads(future.value())
        only(model)


def test_an_error_in_a_callback_comes_out_of_its_future() -> None:
    def fail(_: object) -> None:
        raise ValueError("no")

    with modelled_streams():
        future = streams.future_on(CPU)
        child = future.then(fail).then(torch.futures.Future.value)
        future.set_result(torch.ones(1))
        with pytest.raises(ValueError, match="no"):
            child.wait()


def test_a_thread_is_watched_and_begins_with_the_default_stream() -> None:
    value = torch.ones(4)
    with modelled_streams(checks=False) as model:
        with model.using(model.new_stream()):
            writes(value)
            thread = threading.Thread(target=reads, args=(value,))
            thread.start()
            thread.join()
        assert "reads" in only(model).second.stack.functions


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


def two_communicators(in_order: bool) -> list[str]:
    groups = [dist.new_group(), dist.new_group()]
    first, second = torch.ones(4), torch.ones(4)
    with modelled_streams(is_nccl=True, checks=False) as model, ExitStack() as stack:
        side = model.new_stream()
        work = dist.all_reduce(first, group=groups[0], async_op=True)
        assert work is not None
        if in_order:
            with model.using(side):
                work.wait()

        def other_thread() -> None:
            with model.using(side):
                dist.all_reduce(second, group=groups[1])

        thread = threading.Thread(target=other_thread)
        thread.start()
        thread.join()
        work.wait()
        stack.pop_all()
        return [str(race) for race in model.settle()]


def test_two_communicators_that_two_threads_use_at_once_are_found(ranks2: Ranks) -> None:
    for in_order in (True, False):
        for found in ranks2.run(two_communicators, in_order):
            assert ["two communicators" in race for race in found] == [True] * (not in_order), found


def test_what_hooks_of_a_backward_pass_copy_to_the_device_is_seen() -> None:
    weight = torch.ones(4, requires_grad=True)
    flags: list[Tensor] = []

    def hook(_: Tensor) -> None:
        flags.append(torch.tensor([1.0, 2.0]).pin_memory().to(CPU, non_blocking=True))

    weight.register_post_accumulate_grad_hook(hook)
    with modelled_streams(checks=False) as model:
        weight.sum().backward()
        assert not model.settle()
        with model.using(model.new_stream()):
            reads(flags[0])
        assert "hook" in only(model).first.stack.functions
