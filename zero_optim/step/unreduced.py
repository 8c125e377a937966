"""Parameters that a data-parallel wrapper does not reduce: they were frozen when it was built.

Note [Unfrozen later]
    Such a parameter may train later, with another gradient on each rank. The user may reduce it by hand, so
    ``step()`` compares these gradients between ranks. Without such parameters it only reads a flag of each
    registered one.
"""

from collections.abc import Container, Sequence
from weakref import WeakSet

from torch import Tensor

from zero_optim.comm.agreement import agree
from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.wire import memory_of
from zero_optim.shard.order import digests

NOT_REDUCED = (
    "did not require a gradient when the model was wrapped, and now does: its gradient would not be reduced, "
    "and each rank would train it for itself. Wrap the model while all that will be trained requires a "
    "gradient, with find_unused_parameters=True, and freeze behind that; or wrap it anew"
)
_HINT = f"It {NOT_REDUCED}; or average its gradient on every rank before step()"


class FrozenParams:
    """The names and parameters that one living wrapper does not reduce."""

    def __init__(self, pairs: Sequence[tuple[str, Tensor]]) -> None:
        self._pairs = pairs
        if pairs:
            _REGISTERED.add(self)

    def unfrozen(self) -> list[tuple[str, Tensor]]:
        """Return those that require a gradient now."""
        return [(name, param) for name, param in self._pairs if param.requires_grad]


_REGISTERED: WeakSet[FrozenParams] = WeakSet()


def unreduced_among(params: Container[Tensor]) -> dict[str, Tensor]:
    """Return, by name, parameters that train but that no wrapper reduces. No communication."""
    if not _REGISTERED:
        return {}
    pairs = (pair for frozen in list(_REGISTERED) for pair in frozen.unfrozen())
    return {name: param for name, param in pairs if param in params}


def check_unreduced(group: RankGroup, unreduced: dict[str, Tensor], *, in_join: bool) -> None:
    """Compare the gradients of parameters that the wrapper does not reduce; all ranks call.

    One small collective; the CPU waits. RankMismatchError if a gradient differs; RuntimeError in ``Join``,
    whose joined ranks have no gradient.
    """
    if in_join:
        raise RuntimeError(f"{next(iter(unreduced))} {NOT_REDUCED}")
    grads = {name: param.grad for name, param in unreduced.items()}
    values = iter(
        digests([memory_of(grad.to_dense().contiguous()) for grad in grads.values() if grad is not None])
    )
    items = [
        f"gradient of {name}: {'none' if grad is None else next(values).hex()}"
        for name, grad in grads.items()
    ]
    agree(group, items, "gradients that the wrapper does not reduce", {"gradient": _HINT})
