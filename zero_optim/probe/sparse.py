"""Probes whether ranks may share the rows of a parameter with sparse gradients. No communication.

Coalescing, as in Adagrad, adds a row's entries in an order that depends on other rows. SGD with momentum
keeps a gradient as state, which cannot be joined. Plain SGD adds entry by entry, with equal bits.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from zero_optim.comm.encoding import inner_tensors
from zero_optim.plan.pieces import Piece
from zero_optim.probe.acceptance import first_line_of
from zero_optim.probe.comparison import same_pieces
from zero_optim.probe.subject import OptimizerUnderTest, remembered
from zero_optim.probe.trials import Feed, TrialRun, isolated, start

Take: TypeAlias = Callable[[Tensor, Piece], Tensor]

# The second has gradients with more entries than elements: some code coalesces then.
_SHAPES = ((64, 8), (64, 1))
_NUM_ENTRIES = 300  # of a gradient; sorting that many does not keep the order of those for one row
_CUTS = (0, 16, 48, 64)
_NUM_STEPS = 4


def why_not_sparse_rows(
    optimizer_class: Callable[..., Optimizer],
    options: Mapping[str, Any],
    group: Mapping[str, Any],
    dtype: torch.dtype,
    take: Take,
) -> str | None:
    """Return why a class steps rows of sparse gradients with other bits, or None.

    Gradients have several entries for a row, some more entries than elements; some are coalesced. About 10 ms
    on the CPU; cached. (Accelerator kernels that add in any order have no certain bits, cut or not.) ``take``
    returns a piece's rows of a gradient.
    """
    return _try(OptimizerUnderTest.of(optimizer_class, options, [group]), dtype, take)


@remembered
def _try(subject: OptimizerUnderTest, dtype: torch.dtype, take: Take) -> str | None:
    raised = ""
    with isolated():
        for candidate in subject.candidates():
            try:
                return _difference(candidate, dtype, take)
            except Exception as error:  # noqa: BLE001 - the user's class may raise anything
                raised = first_line_of(error)
    return f"with sparse gradients it raises {raised}"


def _difference(subject: OptimizerUnderTest, dtype: torch.dtype, take: Take) -> str | None:
    feed = Feed(_SHAPES, num_groups=1, num_in_group=1, dtype=dtype).with_groups(subject)
    generator = torch.Generator().manual_seed(20)
    values = {index: _noise(generator, shape, dtype) for index, shape in enumerate(_SHAPES)}
    pieces = [Piece(owner, begin, stop) for owner, (begin, stop) in enumerate(pairwise(_CUTS))]
    whole = start(subject, feed, values)
    cut = start(subject, feed, values, cut=lambda _, value: [value[p.start : p.stop] for p in pieces])
    before = [whole.bits(index) for index in values]
    for step in range(_NUM_STEPS):
        for index, shape in enumerate(_SHAPES):
            gradient = _gradient(generator, shape, dtype, coalesced=step == _NUM_STEPS - 1)
            whole.leaves[index][0].grad = gradient.clone()
            for leaf, piece in zip(cut.leaves[index], pieces, strict=True):
                leaf.grad = take(gradient.clone(), piece)
        whole.optimizer.step()
        cut.optimizer.step()
        for index, shape in enumerate(_SHAPES):
            if whole.bits(index) != cut.bits(index):
                return f"rows of a parameter of shape {shape} differed after step {step + 1}"
    if any(tensor.layout is not torch.strided for run in (whole, cut) for tensor in _held(run)):
        return "its state is sparse then"
    if before == [whole.bits(index) for index in values]:
        return f"no parameter moved in {_NUM_STEPS} steps"
    if whole.global_state():
        return "it keeps state that belongs to no parameter"
    for index, shape in enumerate(_SHAPES):
        if not same_pieces(whole.state_of(index)[0], cut.state_of(index), torch.Size(shape)):
            return f"the state of rows of a parameter of shape {shape} differed"
    return None


def _noise(generator: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)


def _gradient(
    generator: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype, *, coalesced: bool
) -> Tensor:
    """Return a sparse gradient with half of its entries in one row."""
    rows = torch.randint(shape[0], (1, _NUM_ENTRIES), generator=generator)
    rows[0, ::2] = rows[0, 0].clone()
    values = _noise(generator, (_NUM_ENTRIES, *shape[1:]), dtype)
    gradient = torch.sparse_coo_tensor(rows, values, shape, check_invariants=False)
    return gradient.coalesce() if coalesced else gradient


def _held(run: TrialRun) -> Iterator[Tensor]:
    for index in run.leaves:
        for state in run.state_of(index):
            for entry in state.values():
                yield from [entry] if isinstance(entry, Tensor) else inner_tensors(entry)
