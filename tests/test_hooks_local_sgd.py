"""Post-local SGD: when gradients are averaged, and when parameters."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import Parameter

from pool import Ranks
from test_hooks_bucket import FakeBucket, flat_grads, grads_of, make_params
from zero_optim.hooks import PeriodicModelAverager, PostLocalSGDState, make_hook, post_localSGD_hook


def check_hook() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    params = make_params()
    halves, _ = dist.new_subgroups(size // 2)  # type: ignore[no-untyped-call]
    members = [r for r in range(size) if r // (size // 2) == rank // (size // 2)]
    for state, later in (
        (PostLocalSGDState(None, halves, 2), members),
        (PostLocalSGDState(None, None, 2, post_local_gradient_allreduce=False), [rank]),
        (make_hook("post_local_sgd", start="2", subgroup_size=size // 2).state, members),
        (make_hook("post_local_sgd", start=2).state, [rank]),
    ):
        for step in range(4):
            flats = flat_grads(params, step)
            expected = [flats[r] for r in (range(size) if step < 2 else later)]
            for index in range(2):  # two buckets an iteration
                bucket = FakeBucket(params, grads_of(params, rank, step), index, index == 1)
                result = post_localSGD_hook(state, bucket).wait()  # type: ignore[arg-type]
                torch.testing.assert_close(result, torch.stack(expected).mean(0), atol=1e-6, rtol=0)
        saved = state.state_dict()
        assert saved == {"iteration": 4}
        state.load_state_dict({"iteration": 1})
        assert state.iteration == 1


def test_gradients_are_averaged_by_all_until_the_start_and_by_some_afterwards(ranks4: Ranks) -> None:
    ranks4.run(check_hook)


def check_averager() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    shapes, dtypes = ((3, 2), (4,), (5,)), (torch.float32, torch.bfloat16, torch.float32)
    params = [Parameter(torch.zeros(s, dtype=d)) for s, d in zip(shapes, dtypes, strict=True)]
    averager = PeriodicModelAverager(period=3, warmup_steps=2)
    memory, averaged = [param.data_ptr() for param in params], []
    for step in range(9):
        if step == 4:
            restored = PeriodicModelAverager(period=3, warmup_steps=2)
            restored.load_state_dict(averager.state_dict())
            averager = restored
        if rank == 0:
            params[0].grad = torch.ones(3, 2)  # the others have none, which must not matter
        with torch.no_grad():
            for param in params:
                param.fill_(rank)
        averager.average_parameters(params if step < 5 else [{"params": params[:1]}, {"params": params[1:]}])
        values = {float(param.detach().float().unique()) for param in params}
        assert len(values) == 1
        assert values <= {float(rank), (size - 1) / 2}
        averaged.append(values == {(size - 1) / 2})
    assert averaged == [step in (2, 5, 8) for step in range(9)]
    assert memory == [param.data_ptr() for param in params]  # in place: others may hold views
    with pytest.raises(ValueError, match="period"):
        PeriodicModelAverager(period=0)


def test_parameters_are_averaged_in_place_when_it_is_time(ranks: Ranks) -> None:
    ranks.run(check_averager)


def check_training() -> tuple[float, float]:
    from torch.distributed.optim import PostLocalSGDOptimizer

    torch.manual_seed(0)
    model = nn.Linear(6, 2)
    ddp = nn.parallel.DistributedDataParallel(model)
    ddp.register_comm_hook(PostLocalSGDState(None, None, 4, False), post_localSGD_hook)
    averager = PeriodicModelAverager(period=4, warmup_steps=4)
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1), averager)
    trace = []
    for step in range(25):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        inputs = torch.randn(8, 6, generator=generator)
        optimizer.zero_grad()
        loss = (ddp(inputs) - inputs[:, :2]).square().mean()
        loss.backward()
        optimizer.step()  # type: ignore[no-untyped-call]
        trace.append(float(loss.detach()))
        weights = model.weight.detach().clone()
        dist.broadcast(weights, 0)
        if dist.get_rank() == 1:
            assert torch.equal(weights, model.weight) == (step < 4 or step % 4 == 0), step
    return trace[0], trace[-1]


# Importing torch.distributed.optim compiles functional optimizers in that way.
@pytest.mark.filterwarnings("ignore:.torch.jit.(script|interface). is deprecated")
def test_local_sgd_trains_and_the_replicas_meet_again(ranks2: Ranks) -> None:
    for first, last in ranks2.run(check_training):
        assert last < 0.3 * first


def test_impossible_options_are_refused() -> None:
    with pytest.raises(ValueError, match="expected a subgroup, got None: pass"):
        PostLocalSGDState(None, None, 10)
    with pytest.raises(ValueError, match="start_localSGD_iter of at least 0, got -1"):
        PostLocalSGDState(None, None, -1, False)
