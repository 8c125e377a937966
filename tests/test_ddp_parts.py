"""The parts of the reducer that need no ranks: the walk over graphs, buckets, one pass, texts."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fake_streams import fake_streams
from zero_optim.ddp.reducer import report
from zero_optim.ddp.reducer.assignment import BucketAssignment, ReducedParams, ReducerOptions, assign
from zero_optim.ddp.reducer.backward_pass import BackwardPass, PassTerms
from zero_optim.ddp.reducer.gradient_bucket import (
    BATCH_NBYTES,
    LARGE_NBYTES,
    GradBucket,
    ReducerBucket,
    tensor_of,
)
from zero_optim.ddp.reducer.graph import UnusedSearch, nearest, reach, tensors_in
from zero_optim.ddp.reducer.history import History
from zero_optim.plan.buckets import assign_buckets

# ---------------------------------------------------------------------- graph


@dataclass
class Output:
    main: Tensor
    rest: dict[str, Any] = field(default_factory=dict)


def test_tensors_are_found_in_any_nesting() -> None:
    a, b, c, d = (torch.zeros(n) for n in range(4))
    value = [a, (b, {"x": {c}, "y": None, "z": "text"}), Output(d, {"self": [b"bytes", 3, Output]})]
    assert sorted(tensor.numel() for tensor in tensors_in(value)) == [0, 1, 2, 3]
    assert list(tensors_in(a)) == [a]
    assert list(tensors_in({"a": (), "b": object()})) == []


def test_a_container_that_holds_itself_is_looked_into_once() -> None:
    value: list[Any] = [torch.zeros(1)]
    value.append({"again": value, "more": [value, value]})
    output = Output(torch.zeros(2))
    output.rest["output"] = output
    assert [tensor.numel() for tensor in tensors_in(value)] == [1]
    assert [tensor.numel() for tensor in tensors_in(output)] == [2]


def leaves(count: int) -> list[Tensor]:
    return [torch.ones(2, requires_grad=True) for _ in range(count)]


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return 2 * grads[0]


def test_reach_finds_the_leaves_below_outputs() -> None:
    a, b, c, d = leaves(4)
    shared = a * b
    found = reach([shared + 1, shared * c, d])
    assert found.leaves == {id(leaf) for leaf in (a, b, c, d)}
    assert found.is_complete
    assert reach([]).leaves == reach([torch.ones(1)]).leaves == frozenset()
    hidden = reach([Double.apply(a)])
    assert not hidden.is_complete
    both = found | hidden
    assert (both.leaves, both.is_complete) == (found.leaves, False)


def leaf_of(node: Any) -> Any:
    return node.variable


def test_the_nearest_of_the_leaves_looked_for_is_found() -> None:
    a, b, c, _ = leaves(4)
    out = (a.sin().cos() * b).sum() + c.sum()
    assert leaf_of(nearest(out, {id(a), id(b)})) is b
    assert leaf_of(nearest(out, {id(a)})) is a
    assert nearest(out, set()) is None


def test_an_outlook_tells_only_in_a_pass_and_only_once() -> None:
    a, b, c = leaves(3)
    told: list[list[int]] = []
    outlook = UnusedSearch()
    first, second = a * 2, b * 3
    outlook.look([first])
    outlook.look([second])
    hidden = c * first.detach()  # not shown by any output
    loss = (first + second + hidden).sum()
    unused = torch.ones(2, requires_grad=True)
    for _ in range(2):
        handle = first.register_hook(lambda _: told.append(outlook.pop_unused([a, b, c, unused])))
        loss.backward(retain_graph=True)
        handle.remove()
    assert told == [[3], []]
    outlook.look([Double.apply(a)])
    handle = first.register_hook(lambda _: told.append(outlook.pop_unused([unused])))
    loss.backward()
    assert told[2] == []  # what Python does in the graph may reach anything


# ---------------------------------------------------------------------- buckets


def bucket_of(*shapes: tuple[int, ...], view: bool = False, batched: bool = False) -> ReducerBucket:
    params = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    return ReducerBucket(range(len(shapes)), params, is_sparse=False, as_views=view, batched=batched)


def fill(bucket: ReducerBucket) -> list[Tensor]:
    """Give every parameter a gradient of its own."""
    grads = []
    for number, param in enumerate(bucket.params):
        param.grad = torch.full_like(param, number + 1.0)
        grads.append(param.grad)
    return grads


@pytest.mark.parametrize("view", [False, True], ids=["copy", "view"])
@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0, 2], [0, 3, 2], [1, 2], [2], []])
def test_gradients_that_are_taken_are_divided_once_and_others_left(order: list[int], view: bool) -> None:
    bucket = bucket_of((3,), (3,), (3,), (3,), view=view)
    fill(bucket)
    bucket.flat.fill_(7.0)
    bucket.take(order, 2.0)
    for slot in range(4):
        expected = (slot + 1) / 2 if slot in order else 7.0
        assert torch.equal(bucket.views[slot], torch.full((3,), expected)), slot
        assert bucket.is_inside(slot) == (view and slot in order)


def test_views_that_are_gradients_already_are_divided_in_place_and_absent_ones_are_zeros() -> None:
    bucket = bucket_of((2,), (2, 2), (1,), view=True)
    fill(bucket)
    bucket.take([0, 1, 2], 1.0)
    bucket.params[2].grad = None
    bucket.take([0, 1, 2], 4.0)
    assert bucket.flat.tolist() == [0.25, 0.25, 0.5, 0.5, 0.5, 0.5, 0.0]
    assert bucket.params[2].grad is None


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


def test_strides_of_parameters_are_those_of_their_views() -> None:
    param = nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
    transposed = nn.Parameter(torch.randn(4, 6).t())
    bucket = ReducerBucket([0, 1], [param, transposed], is_sparse=False, as_views=False, batched=False)
    assert [view.stride() for view in bucket.views] == [param.stride(), transposed.stride()]
    assert bucket.nbytes == 4 * (120 + 24)


@pytest.mark.parametrize("view", [False, True], ids=["copy", "view"])
def test_results_become_gradients_but_for_those_skipped(view: bool) -> None:
    for in_place in (True, False):
        bucket = bucket_of((2,), (3,), (1,), view=view)
        before = fill(bucket)
        bucket.params[2].grad = None
        result = bucket.flat.fill_(9.0) if in_place else torch.full((6, 1), 9.0, dtype=torch.float64)
        bucket.give(result, [False, True, False])
        grads = [param.grad for param in bucket.params]
        assert grads[1] is before[1]
        assert torch.equal(before[1], torch.full((3,), 2.0))
        for slot in (0, 2):
            grad = grads[slot]
            assert grad is not None
            assert grad.dtype == torch.float32
            assert (grad == 9.0).all()
            assert bucket.is_inside(slot) == view
        assert (grads[0] is before[0]) == (not view)


def sparse_bucket() -> ReducerBucket:
    return ReducerBucket(
        [0], [nn.Parameter(torch.zeros(5, 2))], is_sparse=True, as_views=False, batched=False
    )


def sparse_grad(*rows: int) -> Tensor:
    return torch.sparse_coo_tensor([list(rows)], torch.ones(len(rows), 2), (5, 2), check_invariants=True)


def test_a_sparse_gradient_travels_as_it_is() -> None:
    bucket = sparse_bucket()
    bucket.params[0].grad = sparse_grad(1, 3)
    bucket.pending.append(0)
    bucket.take_pending(2.0)
    assert bucket.flat.is_sparse
    assert bucket.flat.to_dense().sum() == 2
    given = GradBucket(bucket, 0, is_last=True)
    assert given.gradients()[0] is given.buffer() is bucket.flat
    bucket.give(sparse_grad(0), [True])
    assert bucket.params[0].grad.to_dense().sum() == 4  # type: ignore[union-attr]
    bucket.give(sparse_grad(0), [False])
    assert bucket.params[0].grad.to_dense().sum() == 2  # type: ignore[union-attr]
    bucket.params[0].grad = None
    bucket.take([0], 2.0)
    assert bucket.flat.to_dense().abs().sum() == 0
    assert bucket.pop_misfits() == []


def test_gradients_of_the_wrong_layout_are_told_once() -> None:
    bucket = sparse_bucket()
    bucket.params[0].grad = torch.ones(5, 2)
    bucket.take([0], 1.0)
    assert (bucket.pop_misfits(), bucket.pop_misfits(), bucket.params[0].grad) == ([0], [], None)
    dense = bucket_of((5, 2), (2,))
    fill(dense)
    dense.params[0].grad = sparse_grad(1)
    dense.take([0, 1], 1.0)
    assert (dense.pop_misfits(), dense.params[0].grad) == ([0], None)


def test_a_hook_sees_the_buffer_it_has_set() -> None:
    bucket = bucket_of((2,), (1, 3))
    given = GradBucket(bucket, 4, is_last=False)
    assert (given.index(), given.is_last()) == (4, False)
    assert given.buffer() is bucket.flat
    assert [tuple(grad.shape) for grad in given.gradients()] == [(2,), (1, 3)]
    given.set_buffer(torch.arange(5.0))
    assert given.gradients()[1].tolist() == [[2.0, 3.0, 4.0]]
    assert given.parameters() == bucket.params
    given.set_buffer(torch.zeros(4))
    with pytest.raises(RuntimeError, match="bucket 4 was replaced by one of 4 elements: it cannot be viewed"):
        given.gradients()


def test_the_only_tensor_of_a_result_is_found() -> None:
    tensor = torch.ones(1)
    assert tensor_of(tensor) is tensor_of([tensor]) is tensor_of((tensor,)) is tensor
    assert tensor_of([tensor, tensor]) is tensor_of(None) is tensor_of([]) is tensor_of(["text"]) is None


def test_capacities_count_per_kind_and_the_last_one_holds_on() -> None:
    assert assign_buckets("aaaaaa", [4] * 6, [4, 8]) == [[5], [4, 3], [2, 1], [0]]
    assert assign_buckets("abab", [4] * 4, [4, 8]) == [[3], [2], [1], [0]]
    assert assign_buckets("aaaa", [4] * 4, 8, order=[2, 0, 3, 1]) == [[2, 0], [3, 1]]


def test_a_bucket_may_be_full_once_it_has_reached_its_capacity() -> None:
    assert assign_buckets("aaaaaa", [4] * 6, [4, 7], overflow=True) == [[5], [4, 3], [2, 1], [0]]
    assert assign_buckets("aaa", [4, 9, 5], 8, overflow=True) == [[2, 1], [0]]


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


@pytest.mark.parametrize("has_word", [False, True], ids=["", "word"])
def test_buckets_are_launched_in_order_however_gradients_come(has_word: bool) -> None:
    params = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    options = ReducerOptions(bucket_caps_nbytes=(8,), limits_first_buckets=True)
    launched: list[tuple[int, bool]] = []

    def launch(bucket: ReducerBucket, number: int, is_last: bool) -> Landed:
        launched.append((number, is_last))
        return Landed(bucket)

    terms = History(3).terms(ReducerOptions(), 2.0, has_word)
    current = BackwardPass(assigned(params, options), terms, launch)
    every = [(0, False), (1, False), (2, True)]
    for index, count in ((0, 0), (2, 1), (1, 2 if has_word else 3)):
        params[index].grad = torch.full((2,), 4.0)
        current.arrived(index)
        assert launched == every[:count]
    assert current.order == [0, 2, 1]
    current.end()
    current.launch_rest()
    assert launched == every
    current.give([False] * 3)
    assert [param.grad.tolist() for param in params] == [[2.0, 2.0]] * 3  # type: ignore[union-attr]


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
