"""PowerSGD: its arithmetic, what it remembers, and what becomes of that when buckets or jobs change."""

import copy
import io
import logging
import math
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pool import Ranks
from test_hooks_bucket import FakeBucket, flat_grads, grads_of, make_params, run_hook
from zero_optim.hooks import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from zero_optim.hooks.low_rank import orthonormal

SHAPES = ((6, 5), (7,), (6, 5), (), (8, 3, 2), (9, 9))


def make_state(**options: Any) -> PowerSGDState:
    return PowerSGDState(**({"start_powerSGD_iter": 0, "min_compression_rate": 0.01} | options))


def mean_of(flats: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(flats)).mean(0)


def errors_of(state: PowerSGDState) -> Tensor:
    return torch.cat([state.errors.parts[number] for number in sorted(state.errors.parts)])


def check_full_rank(hook: Any) -> None:
    params = make_params(SHAPES)
    state = make_state(matrix_approximation_rank=20)
    for step in range(3):
        result = run_hook(hook, state, params, step)
        # Exact but for rounding: products of matrices of up to 13 rows, entries up to 4.
        torch.testing.assert_close(result, mean_of(flat_grads(params, step)), atol=2e-5, rtol=0)
        # Of a matrix with more rows than columns some is left on each rank, but nothing of their mean.
        left = errors_of(state)
        dist.all_reduce(left)
        assert left.abs().max() < 2e-5


@pytest.mark.parametrize("hook", [powerSGD_hook, batched_powerSGD_hook])
def test_full_rank_is_exact_up_to_rounding(ranks: Ranks, hook: Any) -> None:
    ranks.run(check_full_rank, hook)


def reference(
    ms: list[Tensor], q: Tensor, size: int
) -> tuple[Tensor, list[Tensor], Tensor]:  # result, errors by rank, next q
    """Algorithm 1 in float64 for one matrix, the ranks one after the other."""
    q = torch.linalg.qr(q)[0]
    p = torch.linalg.qr(sum(m @ q for m in ms) / size)[0]
    qs = [m.t() @ p for m in ms]
    q = sum(qs) / size
    return p @ q.t(), [m - p @ local.t() for m, local in zip(ms, qs, strict=True)], q


def check_arithmetic(feedback: bool, warm: bool, batched: bool) -> None:
    size, rank, steps = dist.get_world_size(), dist.get_rank(), 4
    params = make_params(((8, 8),) if batched else ((9, 5),), torch.float64)
    state = make_state(matrix_approximation_rank=2, use_error_feedback=feedback, warm_start=warm)
    hook = powerSGD_hook
    start = torch.randn(params[0].shape[1], 2, dtype=torch.float64)
    errors = [torch.zeros_like(params[0]) for _ in range(size)]
    state.register.places(FakeBucket(params, params))
    state.queries[0,] = start.clone()
    sent, q = torch.zeros_like(params[0]), start
    for step in range(steps if warm else 1):
        flats = [flat.view_as(params[0]) for flat in flat_grads(params, step)]
        ms = [flat + error for flat, error in zip(flats, errors, strict=True)] if feedback else flats
        if not warm:
            generator = torch.Generator().manual_seed(step * 1_000_003)
            q = torch.randn(q.shape, generator=generator, dtype=torch.float64)
        expected, errors, q = reference(ms, q, size)
        result = run_hook(hook, state, params, step).view_as(expected)
        torch.testing.assert_close(result, expected, atol=1e-12, rtol=0)
        if feedback:
            torch.testing.assert_close(errors_of(state), errors[rank].view(-1), atol=1e-12, rtol=0)
        else:
            assert not state.errors.parts
        sent += result
    if feedback:  # what was sent and what is kept are all gradients together
        gradients = sum(mean_of(flat_grads(params, step)) for step in range(steps))
        torch.testing.assert_close(sent.view(-1) + mean_of(errors).view(-1), gradients, atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("feedback", "warm", "batched"),
    [(True, True, False), (False, True, False), (False, False, False), (True, True, True)],
)
def test_power_sgd_is_the_algorithm_of_the_paper(
    ranks: Ranks, feedback: bool, warm: bool, batched: bool
) -> None:
    ranks.run(check_arithmetic, feedback, warm, batched)


def check_conservation(dtype: torch.dtype, tolerance: float) -> None:
    """With vectors, several buckets and low rank; errors averaged over ranks by hand."""
    params, steps = make_params(SHAPES, dtype), 6
    for hook in (powerSGD_hook, batched_powerSGD_hook):
        state = make_state(min_compression_rate=1.1)
        sent = sum(run_hook(hook, state, params, step).float() for step in range(steps))
        errors = errors_of(state).float()
        dist.all_reduce(errors)
        gradients = sum(mean_of([f.float() for f in flat_grads(params, step)]) for step in range(steps))
        assert errors.any()
        total = sent + errors / dist.get_world_size()
        torch.testing.assert_close(total, gradients, atol=tolerance, rtol=0)
        assert torch.equal(same_everywhere(sent), sent)


def same_everywhere(tensor: Tensor) -> Tensor:
    copied = tensor.clone()
    dist.broadcast(copied, 0)
    return copied


# bfloat16 rounds what is sent, six times, at up to 2**-8 of values below 8.
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.2)])
def test_error_feedback_loses_nothing(ranks: Ranks, dtype: torch.dtype, tolerance: float) -> None:
    ranks.run(check_conservation, dtype, tolerance)


def check_rank_one_gradient() -> None:
    """A gradient of rank 1, compressed to rank 3: noise in the other columns must not get in."""
    params = make_params(((40, 30),))
    generator = torch.Generator().manual_seed(0)
    grad = torch.randn(40, 1, generator=generator) @ torch.randn(1, 30, generator=generator)
    for rank in (1, 2, 3):
        state = make_state(matrix_approximation_rank=rank)
        result = powerSGD_hook(state, FakeBucket(params, [grad])).wait()  # type: ignore[arg-type]
        torch.testing.assert_close(result.view(40, 30), grad, atol=1e-5, rtol=0)
    zeros = powerSGD_hook(state, FakeBucket(params, [grad * 0])).wait()  # type: ignore[arg-type]
    assert zeros.abs().max() < 1e-5  # no NaN, and nothing but the rounding error of before
    result = powerSGD_hook(state, FakeBucket(params, [grad])).wait()  # type: ignore[arg-type]
    torch.testing.assert_close(result.view(40, 30), grad, atol=1e-5, rtol=0)


def test_gradients_of_lower_rank_and_zeros_are_exact(ranks2: Ranks) -> None:
    ranks2.run(check_rank_one_gradient)


def test_orthonormal_damps_directions_shorter_than_epsilon() -> None:
    matrices = torch.randn(3, 7, 2, generator=torch.Generator().manual_seed(0))
    matrices[:, :, 1] *= 1e-6
    plain, damped = orthonormal(matrices, 0), orthonormal(matrices, 1e-3)
    torch.testing.assert_close(plain.transpose(1, 2) @ plain, torch.eye(2).expand(3, 2, 2))
    assert (damped[:, :, 0].norm(dim=1) > 0.99).all()
    assert (damped[:, :, 1].norm(dim=1) < 0.01).all()


def check_overflow() -> None:
    params = make_params(SHAPES)
    for hook in (powerSGD_hook, batched_powerSGD_hook):
        state = make_state(matrix_approximation_rank=2)
        run_hook(hook, state, params)
        grads = grads_of(params, dist.get_rank())
        if dist.get_rank() == 1:
            grads[0][2, 2] = math.inf
            grads[5].fill_(math.nan)
        assert not hook(state, FakeBucket(params, grads)).wait().isfinite().all()
        for step in range(2):
            assert run_hook(hook, state, params, step).isfinite().all()
        assert errors_of(state).isfinite().all()


def test_an_overflow_reaches_all_ranks_and_is_not_remembered(ranks2: Ranks) -> None:
    ranks2.run(check_overflow)


def check_new_buckets() -> None:
    """The same parameters, first in two buckets, then in three others, then in one."""
    size, rank = dist.get_world_size(), dist.get_rank()
    params = make_params(SHAPES)
    layouts = ([[5, 4, 3], [2, 1, 0]], [[5, 0], [4, 2, 1], [3]], [[1, 0, 3, 2, 5, 4]])
    for hook in (powerSGD_hook, batched_powerSGD_hook):
        state = make_state(matrix_approximation_rank=2)
        sent = [torch.zeros_like(param) for param in params]
        for step in range(6):
            layout = layouts[step // 2]
            for index, members in enumerate(layout):
                grads = [grads_of(params, rank, step)[member] for member in members]
                bucket = FakeBucket([params[m] for m in members], grads, index, index == len(layout) - 1)
                hook(state, bucket).wait()
                for member, grad in zip(members, bucket.gradients(), strict=True):
                    sent[member] += grad
        assert state.iteration == 6
        assert sorted(number for key in state.queries for number in key) == (
            [0, 1, 3, 5] if hook is powerSGD_hook else list(range(6))
        )
        for param, total in zip(params, sent, strict=True):
            error = state.errors.parts[state.register.numbers[param]].clone()
            dist.all_reduce(error)
            where = next(i for i, p in enumerate(params) if p is param)
            gradients = sum(grads_of(params, r, step)[where] for r in range(size) for step in range(6))
            torch.testing.assert_close(
                total + error.view(param.shape) / size, gradients / size, atol=1e-4, rtol=0
            )


def test_memories_follow_their_parameters_into_other_buckets(ranks2: Ranks) -> None:
    ranks2.run(check_new_buckets)


def make_model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


def train(model: DistributedDataParallel, steps: range, lr: float = 0.1) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for step in steps:
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        inputs = torch.randn(8, 12, generator=generator)
        optimizer.zero_grad()
        (model(inputs) - inputs[:, :4]).square().mean().backward()
        optimizer.step()


def registered(
    state: PowerSGDState, hook: Any, module: nn.Module, cap: float = 0.001
) -> DistributedDataParallel:
    model = DistributedDataParallel(module, bucket_cap_mb=cap)
    model.register_comm_hook(state, hook)
    return model


def check_rebuilt() -> None:
    """PyTorch's DDP rebuilds its buckets after iteration 0: with full rank that must not be seen."""
    for hook in (powerSGD_hook, batched_powerSGD_hook):
        state = make_state(matrix_approximation_rank=64)
        plain, model = (
            DistributedDataParallel(make_model(), bucket_cap_mb=0.001),
            registered(state, hook, make_model()),
        )
        for step in range(4):
            for net in (plain, model):
                train(net, range(step, step + 1))
        assert state.iteration == 4
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


def test_compression_from_iteration_0_survives_rebuilt_buckets(ranks2: Ranks) -> None:
    ranks2.run(check_rebuilt)


def check_start() -> None:
    plain, model = (
        DistributedDataParallel(make_model()),
        registered(
            state := make_state(start_powerSGD_iter=3, min_compression_rate=1.0),
            powerSGD_hook,
            make_model(),
            25,
        ),
    )
    for net in (plain, model):
        train(net, range(3))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert state.compression_stats() == (0.0, 0, 0)
    for net in (plain, model):
        train(net, range(3, 4))
    assert not all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    # (12 + 16) + (16 + 16) + (16 + 4) for the matrices, and 16 + 16 + 4 for the vectors.
    assert state.compression_stats() == ((192 + 256 + 64 + 36) / 116, 548, 116)


def test_nothing_is_compressed_before_the_start(ranks2: Ranks) -> None:
    ranks2.run(check_start)


def check_min_rate() -> None:
    params = make_params(SHAPES)
    for rate, compressed in ((0.01, 4), (1.5, 4), (2.7, 4), (3.0, 2), (4.0, 1), (5.0, 0)):
        state = make_state(min_compression_rate=rate)
        result = run_hook(powerSGD_hook, state, params)
        assert len(state.queries) == compressed, (rate, list(state.queries))
        if not compressed:
            torch.testing.assert_close(result, mean_of(flat_grads(params)), atol=1e-6, rtol=0)
            assert not errors_of(state).any()


def test_the_least_rate_decides_which_matrices_are_compressed(ranks2: Ranks) -> None:
    ranks2.run(check_min_rate)


def check_seed_and_stats() -> None:
    params = make_params(SHAPES)

    def first(**options: Any) -> list[Tensor]:
        state = make_state(use_error_feedback=False, **options)
        return [run_hook(powerSGD_hook, state, params).clone() for _ in range(2)]

    (a0, a1), (b0, b1), (c0, _) = (
        first(warm_start=False, random_seed=1), first(warm_start=False, random_seed=1), first(random_seed=2)
    )  # fmt: skip
    assert torch.equal(a0, b0)
    assert torch.equal(a1, b1)
    assert not torch.equal(a0, c0)
    assert not torch.equal(a0, a1)  # another random start in every iteration
    stream = io.StringIO()
    handler, logger = logging.StreamHandler(stream), logging.getLogger("zero_optim.hooks")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        state = make_state(compression_stats_logging_frequency=2)
        for step in range(5):
            run_hook(powerSGD_hook, state, params, step)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    lines = stream.getvalue().splitlines()
    assert [line.split(":")[0] for line in lines] == [f"PowerSGD, iteration {i}" for i in (0, 2, 4)]


def test_seed_and_statistics(ranks2: Ranks) -> None:
    ranks2.run(check_seed_and_stats)


def check_resume(kind: str) -> None:
    """Train 3 + 3 steps in one go, and with a new model, DDP and state in between."""
    hook = powerSGD_hook
    options = {"min_compression_rate": 1.0, "random_seed": 3}
    whole = registered(make_state(**options), hook, make_model())
    train(whole, range(6))
    state = make_state(**options)
    first = registered(state, hook, make_model())
    train(first, range(3))
    module, resumed = make_model(), make_state(**options)
    module.load_state_dict(copy.deepcopy(first.module.state_dict()))
    buffer = io.BytesIO()
    if kind == "pickle":
        resumed = pickle.loads(pickle.dumps(state))
        assert repr(resumed) == repr(state)
    elif kind == "state dict":
        torch.save(state.state_dict(), buffer)
        buffer.seek(0)
        resumed.load_state_dict(torch.load(buffer, weights_only=True))
    else:  # with names, after which the buckets may differ; here whole again, as fits the comparison
        torch.save(state.state_dict(first.module.named_parameters()), buffer)
        buffer.seek(0)
        resumed.load_state_dict(torch.load(buffer, weights_only=True), module.named_parameters())
    assert resumed.compression_stats() == state.compression_stats()
    # A new DDP starts with its first buckets again, where the long run has the rebuilt ones.
    second = registered(resumed, hook, module)
    train(second, range(3, 6))
    same = [torch.equal(a, b) for a, b in zip(whole.parameters(), second.parameters(), strict=True)]
    assert all(same), same
    assert resumed.iteration == 6


@pytest.mark.parametrize("kind", ["pickle", "state dict", "named state dict"])
def test_a_resumed_run_goes_on_bit_for_bit(ranks2: Ranks, kind: str) -> None:
    ranks2.run(check_resume, kind)


def check_refusals() -> None:
    params, others = make_params(SHAPES), make_params(((6, 5), (7,)))
    state = make_state()
    run_hook(powerSGD_hook, state, params)
    saved = state.state_dict()
    kept = copy.deepcopy(saved)
    with pytest.raises(ValueError, match=r"other options: matrix_approximation_rank=1 saved, 2 here"):
        make_state(matrix_approximation_rank=2).load_state_dict(saved)
    fresh = make_state()
    fresh.load_state_dict(saved)
    with pytest.raises(ValueError, match=r"saved with parameters of shapes .* in bucket 0.*named_parameters"):
        run_hook(powerSGD_hook, fresh, others)
    live = make_state()
    run_hook(powerSGD_hook, live, others)
    with pytest.raises(ValueError, match="expected the state of a hook that met"):
        live.load_state_dict(saved)
    names = [(f"p{i}", param) for i, param in enumerate(params)]
    with pytest.raises(ValueError, match="expected names for all 6 parameters that the hook has met, got 5"):
        state.state_dict(names[1:])
    named = state.state_dict(names)
    with pytest.raises(ValueError, match=r"named_parameters lacks: p0 of shape \(6, 5\)"):
        make_state().load_state_dict(named, names[1:])
    # With names the order does not matter, nor do the buckets.
    turned = make_state()
    turned.load_state_dict(
        named, [(name, twin) for (name, _), twin in zip(names, make_params(SHAPES), strict=True)][::-1]
    )
    assert sorted(turned.register.numbers.values()) == list(range(6))
    run_hook(powerSGD_hook, state, params, step=1)
    assert all(torch.equal(saved["errors"][i], kept["errors"][i]) for i in range(6))  # a snapshot stays
    assert all(torch.equal(saved["queries"][key], kept["queries"][key]) for key in kept["queries"])


def test_a_state_that_does_not_fit_is_refused(ranks2: Ranks) -> None:
    ranks2.run(check_refusals)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("matrix_approximation_rank", 0),
        ("start_powerSGD_iter", -1),
        ("min_compression_rate", 0),
        ("min_compression_rate", float("nan")),
        ("orthogonalization_epsilon", -1e-8),
        ("random_seed", -1),
        ("compression_stats_logging_frequency", 0),
    ],
)
def test_options_out_of_range_are_refused(option: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"expected .*{option}.*got {value}"):
        PowerSGDState(**{option: value})  # type: ignore[arg-type]
