"""What autograd saves while units are in use, and reads after they were freed.

Note [Reads that no output announces]
    The loss may use a tensor that a module kept aside, or the backward pass reads a parameter after all
    gradients of the unit have come, as for ``linear(x, weight.detach())``. It would read an empty storage,
    which crashes. So each tensor that autograd saves in a forward pass gets a hook, which gathers a unit that
    is not whole: 2 µs of the CPU for each. Autograd does not look at versions of tensors with hooks, so that
    is done here. Hooks of others are left alone. PyTorch raises for ``torch.func.grad`` under such hooks.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from zero_optim.compat import private
from zero_optim.compat.autograd import has_saved_tensors_hooks, in_backward
from zero_optim.ddp.full.unit import Unit
from zero_optim.shard.places import is_freed


class SavedReads:
    """The hooks on what autograd saves; ``need`` makes a unit whole in a backward pass, by its number."""

    def __init__(self, units: Sequence[Unit], need: Callable[[int], None], *, is_on: bool) -> None:
        self._units = units
        self._need = need
        self._is_on = is_on
        self.user: object = None  # who set the hooks
        self._hooks = saved_tensors_hooks(self._pack, self._unpack)
        self._unit_of: dict[int, Unit] = {}  # by the address of the storage's object, which stays

    def begin(self, user: object) -> None:
        """Set the hooks for a user, if autograd saves anything and nobody else has some."""
        is_due = self._is_on and self.user is None and torch.is_grad_enabled()
        if is_due and not in_backward() and not has_saved_tensors_hooks():
            self._unit_of = {
                bucket.values.storage_id: unit for unit in self._units for bucket in unit.buckets
            }
            self._hooks.__enter__()
            self.user = user

    def end(self, user: object) -> None:
        """Have no hooks any more, if this user has set them."""
        if self.user is user:
            self.user = None
            self._hooks.__exit__()

    def _pack(self, tensor: Tensor) -> tuple[Tensor, int, Unit | None]:
        unit = None
        if tensor.layout is torch.strided:
            unit = self._unit_of.get(private.cdata(tensor.untyped_storage()))
        if unit is None and is_freed(tensor):
            for of in self._units:
                if any(bucket.values.shows_freed(tensor) for bucket in of.buckets):
                    raise RuntimeError(
                        f"a parameter of {of.name} of shape {tuple(tensor.shape)} is used by another module "
                        "while it is not whole, so that it shows NaN: make the module that uses it a unit in "
                        f"which {of.name} is no unit of its own, or leave both to the outermost one"
                    )
        # What an operation saves of its own output refers to the operation: a cycle that nobody would free.
        return tensor.detach(), tensor._version, unit

    def _unpack(self, packed: tuple[Tensor, int, Unit | None]) -> Tensor:
        tensor, version, unit = packed
        if unit is not None and unit.is_whole:
            unit.arrive()  # perhaps it was gathered on another stream
        elif unit is not None:
            if not in_backward():
                raise RuntimeError(
                    f"what autograd saved of {unit.name} is read outside of a backward pass, when "
                    f"{unit.name} is freed: read it inside zero_optim.ddp.unsharded(module)"
                )
            self._need(unit.number)
        if tensor._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace "
                f"operation: a tensor of shape {tuple(tensor.shape)} is at version {tensor._version}, and "
                f"was saved at version {version}. A step or a load counts as a write to the parameters"
            )
        return tensor
