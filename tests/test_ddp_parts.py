"""The parts of the reducer that need no ranks: the walk over graphs, buckets, one pass, texts."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fake_streams import fake_streams
from zero_optim.ddp.reducer import report
from zero_optim.ddp.reducer.assignment import BucketAssignment, ReducedParams, ReducerOptions, assign
from zero_optim.ddp.reducer.backward_pass import BackwardPass, PassTerms
from zero_optim.ddp.reducer.gradient_bucket import (
    BATCH_NBYTES,
    LARGE_NBYTES,
    ReducerBucket,
)
from zero_optim.ddp.reducer.graph import tensors_in
from zero_optim.ddp.reducer.history import History

# ---------------------------------------------------------------------- graph


@dataclass
class Output:
    main: Tensor
    rest: dict[str, Any] = field(default_factory=dict)


def test_a_container_that_holds_itself_is_looked_into_once() -> None:
    value: list[Any] = [torch.zeros(1)]
    value.append({"again": value, "more": [value, value]})
    output = Output(torch.zeros(2))
    output.rest["output"] = output
    assert [tensor.numel() for tensor in tensors_in(value)] == [1]
    assert [tensor.numel() for tensor in tensors_in(output)] == [2]


# ---------------------------------------------------------------------- buckets


def bucket_of(*shapes: tuple[int, ...], view: bool = False, batched: bool = False) -> ReducerBucket:
    params = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    return ReducerBucket(range(len(shapes)), params, is_sparse=False, as_views=view, batched=batched)


def test_small_gradients_are_copied_in_batches_and_batched_ones_all_at_once() -> None:
    numel = LARGE_NBYTES // 4 - 1  # elements of the largest that are small
    length = BATCH_NBYTES // (4 * numel)  # of a batch
    shapes = [(numel + 1,), *[(numel,)] * 2 * length]
    plain, batched = (bucket_of(*shapes, batched=flag) for flag in (False, True))
    assert (plain.batch_length, plain.large_slots) == (length, {0})
    assert (batched.batch_length, batched.large_slots) == (len(shapes), frozenset())
    assert arrivals(shapes, batched=False) == [1] * length + [1 + length] * length + [1 + 2 * length]
    assert arrivals(shapes, batched=True) == [0] * 2 * length + [1 + 2 * length]
    sparse = ReducerBucket(
        [0], [nn.Parameter(torch.zeros(numel + 1))], is_sparse=True, as_views=False, batched=False
    )
    assert sparse.large_slots == frozenset()


def arrivals(shapes: list[tuple[int, ...]], *, batched: bool) -> list[int]:
    """How many gradients lie in the bucket each time that one more has come."""
    params = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    count = len(params)
    options = ReducerOptions(bucket_caps_nbytes=(2**30,), batched_grad_copy=batched)
    assignment = assign(ReducedParams.of(params), options, range(count))
    terms = History(count).terms(options, 2.0, can_carry_word=True)
    (bucket,) = assignment.buckets
    current = BackwardPass(assignment, terms, landed)
    filled = []
    for index, param in enumerate(params):
        param.grad = torch.ones_like(param)
        current.arrived(index)
        filled.append(sum(bool((view == 0.5).all()) for view in bucket.views))
    return filled


def sparse_bucket() -> ReducerBucket:
    return ReducerBucket(
        [0], [nn.Parameter(torch.zeros(5, 2))], is_sparse=True, as_views=False, batched=False
    )


def sparse_grad(*rows: int) -> Tensor:
    return torch.sparse_coo_tensor([list(rows)], torch.ones(len(rows), 2), (5, 2), check_invariants=True)


# ---------------------------------------------------------------------- one pass


class Landed:
    """A reduction that leaves a bucket as it is."""

    def __init__(self, bucket: ReducerBucket) -> None:
        self._bucket = bucket

    def wait(self) -> Tensor:
        return self._bucket.flat


def landed(bucket: ReducerBucket, number: int, is_last: bool) -> Landed:
    return Landed(bucket)


def assigned(
    params: list[nn.Parameter], options: ReducerOptions, order: list[int] | None = None
) -> BucketAssignment:
    return assign(ReducedParams.of(zip("abc", params, strict=True)), options, order)


def test_a_gradient_that_comes_though_it_was_taken_for_unused() -> None:
    """In time it is reduced; too late it is reported."""
    params = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    options = ReducerOptions(bucket_caps_nbytes=(16,))
    assignment = assigned(params, options, [2, 1, 0])  # c and b, then a
    terms = PassTerms("some", [1, 1, 1], False, False, 1.0, [False] * 3)
    for presumed, is_late in (([1], False), ([1, 2], True)):
        current = BackwardPass(assignment, terms, landed)
        current.presume_unused(presumed)
        params[1].grad = torch.ones(2)
        current.arrived(1)
        message = current._troubles.message() or ""
        assert message.startswith("a gradient came for b after") == is_late
        assert current.reductions.num_launched == int(is_late)
        current.arrived(1)
        assert "only once. A second gradient came in one backward pass" in str(current._troubles.message())


# ---------------------------------------------------------------------- texts


def test_messages_name_some_parameters_and_count_the_rest() -> None:
    names = [f"layer.{number}" for number in range(13)]
    assert report.names_text(names[:2]) == "layer.0, layer.1"
    assert report.names_text(names).endswith("layer.9 and 3 more")
    for text, parts in (
        (
            report.NO_GRADIENT,
            ("find_unused_parameters=True", "static_graph=True", "requires_grad=False", "no_sync"),
        ),
        (report.TWICE, ("use_reentrant=False", "static_graph=True")),
        (report.MORE, ("more gradients", "Leave static_graph out")),
        (report.FEWER, ("fewer gradients", "Leave static_graph out")),
        (report.LATE_GRADIENT, ("return every tensor",)),
        (report.SPARSE, ("a sparse gradient where a dense one", "nn.EmbeddingBag")),
        (report.DENSE, ("a dense gradient where a sparse one", "nn.Embedding")),
    ):
        troubles = report.PassTroubles()
        for name in (names[0], names[1], names[0]):
            troubles.note(text, name)
        message = str(troubles.message())
        for part in ("layer.0, layer.1", *parts):
            assert part in message, (text, part)


def test_the_memory_of_a_sparse_gradient_is_kept_for_the_stream_that_reads_it() -> None:
    bucket, grad = sparse_bucket(), sparse_grad(1, 3)
    bucket.params[0].grad = grad
    with fake_streams() as accelerator:
        bucket.record_use([0])
        assert accelerator.were_used_on("main", grad._indices(), grad._values())
