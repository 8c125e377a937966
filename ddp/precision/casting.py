"""Computation in a narrower dtype than the parameters', for ``mixed_precision=`` of DDP.

Note [Casts in the place of parameters]
    During a forward pass modules see casts in the place of their parameters. Autograd made them, so gradients
    reach the parameters in their dtype, by the same hooks. Checkpointed activations are computed again in the
    backward pass: casts are put back when it reaches the forward pass's output, until it ends. PyTorch's DDP
    replaces each parameter's data, and leaves it narrow where no backward pass follows.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from zero_optim.ddp.reducer.graph import on_gradient, tensors_in
from zero_optim.ddp.reducer.inbox import when_backward_ends
from zero_optim.shard.lazy import wait_for_gathers

# What a recurrent module knows its weights by, besides the usual place; it makes both anew when they change.
_RNN_LISTS = ("_flat_weights", "_flat_weight_refs")


def cast_buffers(module: nn.Module, dtype: torch.dtype | None, ignored: Collection[str]) -> None:
    """Cast a model's floating-point buffers for good; None leaves them alone."""
    for name, buffer in module.named_buffers():
        if dtype is not None and name not in ignored and buffer.is_floating_point():
            buffer.data = buffer.to(dtype)


class Casting:
    """Casts a model's floating-point parameters, but for ignored names, to a dtype; None for none.

    ``sparse``: those with sparse gradients. Does not communicate.
    """

    def __init__(
        self,
        module: nn.Module,
        dtype: torch.dtype | None,
        ignored: Collection[str],
        sparse: Collection[Tensor] = (),
    ) -> None:
        self.module = module
        self.dtype = dtype
        self._sparse = frozenset(sparse)
        self.params = frozenset(
            param
            for name, param in module.named_parameters()
            if name not in ignored and param.is_floating_point()
        )
        for param in self.params:
            # Where PyTorch's keeps a parameter's other data. Programs look there for the two dtypes, its own
            # tests among them. There are no elements: nothing is kept twice.
            marked: Any = param
            marked._mp_param = param.new_empty(0, dtype=dtype, requires_grad=False)
            marked._fp_param = param.new_empty(0, requires_grad=False)

    def cast(self, param: Tensor) -> Tensor:
        """Cast one parameter, for autograd to see."""
        if param not in self._sparse:
            return param.to(self.dtype)
        cast: Tensor = _SparseCast.apply(param, self.dtype)  # type: ignore[no-untyped-call]
        return cast


class _SparseCast(torch.autograd.Function):
    """A cast whose gradient may be sparse; that of ``Tensor.to`` has to be as dense as what was cast."""

    @staticmethod
    def forward(ctx: Any, param: Tensor, dtype: torch.dtype) -> Tensor:  # noqa: ANN401 - PyTorch's
        ctx.dtype = param.dtype
        return param.to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401 - PyTorch's
        return grads[0].to(ctx.dtype), None


class Casts:
    """Casts for one forward pass, and for the backward passes through it, from the present parameters."""

    def __init__(self, casting: Casting) -> None:
        wait_for_gathers(casting.module)
        self._casting = casting
        self._places: list[tuple[dict[str, Any], str, Tensor]] = []
        self._lists: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._tensors: dict[Tensor, Tensor] = {}
        self._in_backward = False  # modules find the casts while a backward pass through an output runs
        if casting.dtype is None:
            return
        for layer in casting.module.modules():
            slots: dict[str, Any] = layer._parameters
            for name, param in slots.items():
                if param is not None and param.dtype != casting.dtype and param in casting.params:
                    self._places.append((slots, name, param))
            if isinstance(layer, nn.RNNBase):
                attributes = vars(layer)
                self._lists.append(
                    (attributes, {name: attributes[name] for name in _RNN_LISTS if name in attributes})
                )

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Replace the modules' parameters by the casts."""
        self._put()
        try:
            yield
        finally:
            self._take()

    def _put(self) -> None:
        if not self._tensors:  # a parameter that modules share is cast once
            self._tensors = {param: self._casting.cast(param) for _, _, param in self._places}
        for slots, name, param in self._places:
            slots[name] = self._tensors[param]

    def _take(self) -> None:
        for slots, name, param in self._places:
            if slots.get(name) is self._tensors[param]:  # not if something else was put there meanwhile
                slots[name] = param
        for attributes, lists in self._lists:
            attributes.update(lists)

    def return_in_backward(self, output: object) -> None:
        """Put the casts back while a backward pass through an output runs, then drop them."""
        if not self._places or not torch.is_grad_enabled():
            return
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                on_gradient(tensor, self._reached)

    def _reached(self, _: Tensor) -> None:
        if self._in_backward:
            return
        with torch.enable_grad():  # a second pass through one graph finds none, and casts again
            self._put()
        self._in_backward = True
        when_backward_ends(self._leave, self._leave)

    def _leave(self) -> None:
        self._take()
        self._tensors = {}  # the output may be kept, and these with it
        self._in_backward = False
