"""Statistics: PyTorch's names, sane values, and measured in few iterations."""

import time
from typing import Any

import pytest
import torch

from ddp_pairs import SMALL_MB, Pair, mlp, mlp_loss
from pool import Ranks
from zero_optim.ddp import DistributedDataParallel
from zero_optim.ddp.statistics import ALWAYS, Clock

TIMES = (
    "forward_compute_time",
    "backward_compute_time",
    "backward_comm_time",
    "backward_compute_comm_overlap_time",
)


def check_keys(options: dict[str, Any]) -> None:
    begun = time.time_ns()
    pair = Pair.of(mlp(), **options)
    built = pair.ours.get_ddp_logging_data()
    assert built["iteration"] == built["has_rebuilt_buckets"] == built["num_buckets_reduced"] == 0
    assert "rebuilt_bucket_sizes" not in built
    assert not any("time" in key for key in built)
    for number in range(3):
        for model in pair:
            mlp_loss(model, number).backward()
    theirs = pair.theirs._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    ours = pair.ours._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    assert ours == pair.ours.get_ddp_logging_data()
    assert set(theirs) <= set(ours), set(theirs) - set(ours)
    for key in theirs:
        assert type(ours[key]) is type(theirs[key]), key
    for key in (
        "backend_name", "broadcast_buffers", "bucket_cap_bytes", "device_ids", "find_unused_parameters",
        "gloo_num_threads", "gradient_as_bucket_view", "has_rebuilt_buckets", "has_sync_bn", "iteration",
        "module_name", "num_parameter_tensors", "output_device", "prev_iteration_grad_ready_order_indices",
        "rank", "total_parameter_size_bytes", "unused_parameter_size", "world_size",
    ):  # fmt: skip
        if key in theirs and not (key == "has_rebuilt_buckets" and options.get("static_graph")):
            assert ours[key] == theirs[key], (key, ours[key], theirs[key])
    passed = time.time_ns() - begun
    for key in TIMES:
        assert 0 <= ours[key] <= passed, key
        overlaps = ours["num_buckets_reduced"] > 1  # the last goes when the backward pass has ended
        assert overlaps <= ours[f"avg_{key}"] <= passed, key
    for key in ("forward_compute_time_start", "backward_compute_time_end", "backward_comm_time_start"):
        assert begun < ours[key] <= time.time_ns(), key
    assert ours["backward_compute_time"] >= ours["backward_compute_comm_overlap_time"]
    assert ours["backward_comm_time"] >= ours["backward_compute_comm_overlap_time"]
    assert ours["iteration"] == 2  # done before the last one
    assert ours["dtypes"] == "float32"
    assert ours["can_set_static_graph"] == 1
    assert ours["static_graph"] == int(options.get("static_graph", False))
    sizes = [int(size) for size in ours["bucket_sizes"].split(", ")]
    assert (
        sum(sizes) == ours["total_parameter_size_bytes"] == 4 * sum(p.numel() for p in pair.ours.parameters())
    )
    assert len(sizes) == ours["num_buckets_reduced"]
    if ours["has_rebuilt_buckets"]:
        assert ours["rebuilt_bucket_sizes"] == ours["bucket_sizes"]
        assert len(ours["rebuilt_per_bucket_param_indices"].split("; ")) == len(sizes)


def check_all_keys() -> None:
    for options in (
        {},
        {"bucket_cap_mb": SMALL_MB, "gradient_as_bucket_view": True},
        {"static_graph": True},
        {"find_unused_parameters": True},
    ):
        check_keys(options)


def test_names_and_values_are_those_of_pytorch(ranks2: Ranks) -> None:
    ranks2.run(check_all_keys)


def check_rate() -> None:
    model = DistributedDataParallel(mlp())
    model._set_ddp_runtime_logging_sample_rate(5)  # type: ignore[no-untyped-call]
    measured = []
    for number in range(21):
        mlp_loss(model, number).backward()
        start = model.get_ddp_logging_data()["forward_compute_time_start"]
        if start not in measured:
            measured.append(start)
    assert len(measured) == ALWAYS + 3  # and numbers 10, 15 and 20
    with pytest.raises(ValueError, match="equal or greater than 1"):
        model._set_ddp_runtime_logging_sample_rate(0)  # type: ignore[no-untyped-call]


def test_the_first_ten_iterations_and_then_every_so_many_are_measured(ranks1: Ranks) -> None:
    ranks1.run(check_rate)


def check_unused() -> None:
    net = mlp()
    net.spare = torch.nn.Linear(8, 8)
    net.forward = lambda x: torch.nn.Sequential.forward(net[:-1], x)  # type: ignore[method-assign]
    model = DistributedDataParallel(net, find_unused_parameters=True)
    mlp_loss(model, 0).backward()
    data = model.get_ddp_logging_data()
    assert data["unused_parameter_size"] == 4 * 72
    assert data["can_set_static_graph"] == 1


def test_unused_parameters_are_told(ranks1: Ranks) -> None:
    ranks1.run(check_unused)


# ---------------------------------------------------------------------- the clock alone


class Event:
    """A stand-in for a CUDA event: seconds go by between any two."""

    now = 0.0

    def record(self) -> None:
        Event.now += 1.0
        self.at = Event.now

    def synchronize(self) -> None:
        assert self.at

    def elapsed_time(self, other: "Event") -> float:
        return (other.at - self.at) * 1e3


def run_iteration(clock: Clock) -> None:
    clock.begin()
    for mark in ("backward", "reduction", "reduction", "backward_end"):
        clock.mark(mark)  # type: ignore[arg-type]
    clock.end()


def test_on_cuda_marks_are_events_that_are_read_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event())
    clock = Clock(on_cuda=True)
    assert clock.figures() == {}
    for _ in range(3):
        run_iteration(clock)
    second = 10**9
    # forward, backward, reduction, backward_end and reduction_end, a second apart
    expected = {
        "forward_compute_time": second,
        "backward_compute_time": 2 * second,
        "backward_comm_time": 2 * second,
        "backward_compute_comm_overlap_time": second,
    }
    assert clock.figures() == expected | {f"avg_{name}": value for name, value in expected.items()}
    assert (clock.num_iterations, clock.num_sampled) == (3, 2)


def test_iterations_that_were_not_finished_are_not_counted() -> None:
    clock = Clock(on_cuda=False)
    run_iteration(clock)
    run_iteration(clock)
    before = clock.figures()
    clock.begin()
    clock.mark("backward")
    assert clock.figures() == before
    clock.begin()
    clock.end()
    assert clock.figures() == {}  # nothing whole lies behind this one
    run_iteration(clock)
    assert clock.num_sampled == 2
    assert clock.figures()["backward_compute_time"] >= 0
