"""Works that an accelerator does while the CPU goes on: how the watchdog asks, what is kept, what raises."""

import ctypes
import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from device_names import GPU3, NCCL
from fake_streams import FakeAccelerator, FakeEvent, FakeModule, fake_streams
from pool import on_ranks
from waiting import LIMIT
from zero_optim import StalledError
from zero_optim.comm.backends import parse_config
from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.work_log import Verdict
from zero_optim.comm.works import Work
from zero_optim.compat import streams
from zero_optim.health.watchdog import Watchdog


class Handle:
    """Of a collective that has not ended; it keeps what the collective brings."""

    def __init__(self, used: list[object]) -> None:
        self.used = used
        self.asked: list[list[object]] = []

    def is_completed(self) -> bool:
        self.asked.append(list(self.used))
        return False

    def wait(self) -> None:
        pass


class Module(FakeModule):
    """What ``torch.cuda`` is; notes which devices the thread uses."""

    def __init__(self) -> None:
        super().__init__()
        self.used: list[object] = []
        self.captures = False

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        self.used.append(device)
        yield
        self.used.remove(device)

    def is_current_stream_capturing(self) -> bool:
        return self.captures


@contextmanager
def late_group(patch: pytest.MonkeyPatch) -> Iterator[tuple[RankGroup, Watchdog, Module]]:
    module, group = Module(), replace(RankGroup.of(None), backends=parse_config(NCCL))
    accelerator = FakeAccelerator(module=module)
    patch.setattr(streams, "accelerator_of", lambda device: accelerator)
    watchdog = Watchdog(group.works.log, dist.group.WORLD)  # type: ignore[arg-type]
    try:
        yield group, watchdog, module
    finally:
        watchdog._listener.close()


def late_work(group: RankGroup, handle: Handle) -> Work:
    return group.begin_work("", GPU3).take(handle)  # type: ignore[arg-type]


@on_ranks(1)
def test_the_watchdog_asks_about_a_work_with_the_device_of_the_work() -> None:
    """Else its thread, which never set a device, has each rank make a context of half a GB on device 0."""
    with pytest.MonkeyPatch.context() as patch, late_group(patch) as (group, watchdog, module):
        handle = Handle(module.used)
        _kept = late_work(group, handle)
        thread = threading.Thread(target=watchdog._look)
        thread.start()
        thread.join()
    assert handle.asked == [[GPU3]]


class Driver:
    """The call of CUDA's driver by which a thread says what captures of others mean to it."""

    def __init__(self) -> None:
        self.mode = 0  # of a thread: global

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        given = ctypes.cast(mode, ctypes.POINTER(ctypes.c_int)).contents
        self.mode, given.value = given.value, self.mode
        return 0


@on_ranks(1)
def test_the_watchdog_asks_in_a_mode_that_leaves_captures_of_other_threads_alone() -> None:
    driver, modes = Driver(), []
    with pytest.MonkeyPatch.context() as patch, late_group(patch) as (group, watchdog, _):
        patch.setattr(streams, "_driver", lambda: driver)
        handle = Handle([])
        patch.setattr(handle, "is_completed", lambda: modes.append(driver.mode))
        _kept = late_work(group, handle)
        watchdog._look()
    assert (modes, driver.mode) == ([1], 0)


@on_ranks(1)
def test_what_a_graph_captures_is_never_asked_about() -> None:
    with pytest.MonkeyPatch.context() as patch, late_group(patch) as (group, watchdog, module):
        before = late_work(group, Handle([]))
        module.captures = True
        before.wait()
        assert group.works.outstanding is None  # an event of a capture cannot be asked either
        _kept = late_work(group, Handle([]))
        assert group.works.outstanding is None
        watchdog._look()


@on_ranks(1)
def test_the_handle_of_a_work_is_kept_by_nobody_once_a_stream_waits_for_it() -> None:
    """It keeps all that the work brings: the rows of all ranks."""
    with pytest.MonkeyPatch.context() as patch, late_group(patch) as (group, watchdog, _):
        handle = Handle([])
        kept = weakref.ref(handle)
        work = late_work(group, handle)
        assert group.works.outstanding is work
        work.wait()
        del work, handle
        gc.collect()
        assert kept() is None
        awaited: Any = group.works.outstanding
        watchdog._look()
        assert group.works.outstanding is awaited  # it has not ended
        awaited.handles[0].event.has_passed = True
        watchdog._look()
        assert group.works.outstanding is None


@on_ranks(1)
def test_a_device_that_failed_after_the_wait_does_not_end_the_watchdog() -> None:
    with pytest.MonkeyPatch.context() as patch, late_group(patch) as (group, watchdog, _):
        late_work(group, Handle([])).wait()
        awaited: Any = group.works.outstanding
        awaited.handles[0].event = SimpleNamespace(
            query=mock.Mock(side_effect=RuntimeError("device-side assert"))
        )
        errors: list[Exception] = []
        patch.setattr(watchdog._verdicts, "look_at_failure", lambda _, error: errors.append(error))
        watchdog._look()
        assert list(map(str, errors)) == ["device-side assert"]
        assert group.works.outstanding is None


@on_ranks(2)
def test_a_cpu_that_waits_for_what_an_accelerator_agrees_on_is_seen_and_raises() -> None:
    """The device never comes to an end; the watchdog gives the group up while the CPU waits."""
    group, seen = RankGroup.of(None).during("state"), []

    def synchronize(_: object) -> None:
        seen.extend(work.text for work in group.works.log.waits())
        group.works.log.give_up(group.works.whole, Verdict("stalled: rank 1 has not come"))

    with (
        fake_streams(),
        mock.patch.object(FakeEvent, "synchronize", synchronize),
        pytest.raises(StalledError, match="rank 1 has not come"),
    ):
        group.all_gather_fixed(b"x")
    assert seen == ["the exchange of optimizer state"]


@on_ranks(1)
def test_breaking_connections_aborts_the_communicators_of_other_backends() -> None:
    group = RankGroup.of(None)
    aborted = threading.Event()
    backend = SimpleNamespace(abort=aborted.set)
    with mock.patch.object(type(group.process_group), "_get_backend", return_value=backend):
        group.works.cut()
    assert aborted.wait(LIMIT)


@on_ranks(1)
def test_a_work_of_a_device_is_late_before_pytorch_ends_the_process() -> None:
    with pytest.MonkeyPatch.context() as patch, late_group(patch) as (group, _, _):
        group.works.limit = 600.0
        assert late_work(group, Handle([])).timeout == 540.0
        assert late_work(group.within(3600.0), Handle([])).timeout == 540.0
        assert late_work(group.within(60.0), Handle([])).timeout == 60.0
        assert group.begin_work().timeout == 600.0
