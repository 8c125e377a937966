"""A unit that is used on two streams."""

import torch

from fake_streams import FakeStream, fake_streams
from zero_optim.flow.pending import Pending
from zero_optim.plan.layout import whole
from zero_optim.shard.bucket import Members
from zero_optim.shard.rows.row_values import RowValues
from zero_optim.shard.rows.unit_memory import UnitMemory


def test_a_stream_waits_for_a_unit_that_another_stream_has_waited_for() -> None:
    with fake_streams() as streams:
        params = [torch.ones(4), torch.ones(4)]
        values = RowValues(Members(params, whole([4, 4], [0, 1]), 0))
        for param in params:
            values.take_in(param)
        flat, _ = values.fill()
        values.keep(Pending([], lambda _: values.receive(flat), [flat]))
        values.arrive()
        come = streams.events[-1]
        values.arrive()
        side = FakeStream("side")
        with streams.module.stream(side):
            values.arrive()
        assert values.is_whole
        assert [stream.awaited for stream in (streams.stack[0], side)] == [[], [come]]
        assert streams.were_used_on("side", flat)
        values.free()
        assert not values.is_whole


def test_memory_that_another_stream_frees_goes_back_when_that_stream_is_done() -> None:
    with fake_streams() as streams:
        memory = UnitMemory(8, torch.float32, torch.device("cpu"))
        with streams.module.stream(FakeStream("side")):
            memory.free()
        was_used = streams.were_used_on("side", memory.flat)
    assert was_used  # not in one line: pytest would show the freed tensor
