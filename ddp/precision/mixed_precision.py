"""Computing in a narrower dtype than parameters are kept in, for ``mixed_precision=``.

Note [Casts in the place of parameters]
    During a forward pass modules find casts where their parameters are kept. Autograd has made the casts, so
    gradients come through them to the parameters, and are like any other gradient: of the parameter's dtype,
    added up in it, counted by the same hooks. Parameters stay what they are all the while; optimizers and
    checkpoints see nothing of it.

    Checkpointed activations are computed again while the backward pass runs. So the casts are put back in
    place when the pass reaches the output of the forward pass, and taken out when it ends, however it does.

    PyTorch's DDP gives each parameter other data instead, from the forward pass to the end of the backward
    pass. A forward pass without a backward pass, to evaluate, then leaves the model in the narrow dtype.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from zero_optim.compat import private
from zero_optim.ddp.reducer.graph import tensors_in
from zero_optim.ddp.reducer.inbox import when_backward_ends
from zero_optim.shard.lazy import wait_for_gathers

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# What a recurrent module knows its weights by, besides the usual place; it makes both anew when they change.
_RNN_LISTS = ("_flat_weights", "_flat_weight_refs")


@dataclass(frozen=True, slots=True)
class Precision:
    """Which dtypes are used for what; None leaves things in their own.

    Attributes:
        param_dtype: that parameters and inputs are cast to for the forward pass.
        reduce_dtype: in which gradients are reduced.
        buffer_dtype: that buffers are cast to, for good.
    """

    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    buffer_dtype: torch.dtype | None

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> "Precision | None":
        """Read the argument ``mixed_precision`` of DDP, and check that the others go with it.

        Args:
            arguments: of DDP's constructor, by name.

        Returns:
            None if there is no ``mixed_precision``.

        Raises:
            TypeError: it is not PyTorch's ``_MixedPrecision``, or the module is compiled by TorchScript.
            ValueError: a dtype that nothing can be computed or reduced in, or an argument that does not go
                with it.
        """
        given = arguments.get("mixed_precision")
        if given is None:
            return None
        if not isinstance(given, private.MixedPrecision):
            raise TypeError(
                "expected mixed_precision to be a torch.nn.parallel.distributed._MixedPrecision, got "
                f"{type(given).__name__}"
            )
        for name in ("param_dtype", "reduce_dtype", "buffer_dtype"):
            if getattr(given, name) not in (None, *_DTYPES):
                raise ValueError(
                    f"expected mixed_precision's {name} to be None or one of {', '.join(map(str, _DTYPES))}, "
                    f"got {getattr(given, name)!r}"
                )
        if arguments.get("delay_all_reduce_named_params"):
            raise ValueError(
                "mixed_precision does not go with delay_all_reduce_named_params: these gradients are reduced "
                "in the parameters' own dtype. Leave one of the two out"
            )
        if any(isinstance(layer, torch.jit.ScriptModule) for layer in arguments["module"].modules()):
            raise TypeError(
                "mixed_precision cannot cast the parameters of modules compiled by TorchScript: wrap the "
                "model itself, or use torch.compile"
            )
        return cls(given.param_dtype, given.reduce_dtype or given.param_dtype, given.buffer_dtype)


def cast_buffers(module: nn.Module, dtype: torch.dtype | None, ignored: Collection[str]) -> None:
    """Cast a model's floating-point buffers for good, as PyTorch's DDP does when it is constructed.

    Args:
        module: the model.
        dtype: None leaves them alone.
        ignored: names of those to leave alone.
    """
    for name, buffer in module.named_buffers():
        if dtype is not None and name not in ignored and buffer.is_floating_point():
            buffer.data = buffer.to(dtype)


class Casting:
    """Casts a model's floating-point parameters for its forward passes. Does not communicate.

    Args:
        module: the model.
        precision: what to.
        ignored: names of parameters to leave alone.
        sparse: parameters whose gradients are sparse.
    """

    def __init__(
        self,
        module: nn.Module,
        precision: Precision,
        ignored: Collection[str],
        sparse: Collection[Tensor] = (),
    ) -> None:
        self._module = module
        self._dtype = precision.param_dtype
        self._sparse = frozenset(sparse)
        self._params = frozenset(
            param
            for name, param in module.named_parameters()
            if name not in ignored and param.is_floating_point()
        )
        for param in self._params:
            # Where PyTorch's keeps a parameter's other data. Programs look there for the two dtypes, its own
            # tests among them. There are no elements: nothing is kept twice.
            marked: Any = param
            marked._mp_param = param.new_empty(0, dtype=self._dtype, requires_grad=False)
            marked._fp_param = param.new_empty(0, requires_grad=False)

    def casts(self) -> "Casts":
        """Make casts for one forward pass, from the parameters as they are now."""
        wait_for_gathers(self._module)
        return Casts(self._module.modules(), self._params, self._sparse, self._dtype)


class _SparseCast(torch.autograd.Function):
    """A cast whose gradient may be sparse; that of ``Tensor.to`` has to be as dense as what was cast."""

    @staticmethod
    def forward(ctx: Any, param: Tensor, dtype: torch.dtype) -> Tensor:  # noqa: ANN401 - PyTorch's
        ctx.dtype = param.dtype
        return param.to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401 - PyTorch's
        return grads[0].to(ctx.dtype), None


class CastPhase(Enum):
    """Where casts stand. Each pass takes them from ``AWAY`` to its own phase, and back when it ends."""

    AWAY = "modules have their parameters"
    IN_FORWARD = "modules find the casts, while the forward pass runs"
    IN_BACKWARD = "modules find the casts, while a backward pass through an output runs"


class Casts:
    """Casts for one forward pass, and for the backward passes through it.

    See Note [Casts in the place of parameters].

    Args:
        layers: the modules of a model.
        params: those of their parameters that are to be cast.
        sparse: those whose gradients are sparse.
        dtype: what to; None casts none.
    """

    def __init__(
        self,
        layers: Iterable[nn.Module],
        params: Collection[Tensor],
        sparse: Collection[Tensor],
        dtype: torch.dtype | None,
    ) -> None:
        self._dtype = dtype
        self._sparse = sparse
        self._places: list[tuple[dict[str, Any], str, Tensor]] = []
        self._lists: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._tensors: dict[Tensor, Tensor] = {}
        self._phase = CastPhase.AWAY
        if dtype is None:
            return
        for layer in layers:
            slots: dict[str, Any] = layer._parameters
            for name, param in slots.items():
                if param is not None and param.dtype != dtype and param in params:
                    self._places.append((slots, name, param))
            if isinstance(layer, nn.RNNBase):
                known = vars(layer)
                self._lists.append((known, {name: known[name] for name in _RNN_LISTS if name in known}))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Have the modules find the casts in the place of their parameters."""
        self._put()
        self._phase = CastPhase.IN_FORWARD
        try:
            yield
        finally:
            self._take()
            self._phase = CastPhase.AWAY

    def _put(self) -> None:
        if not self._tensors:  # a parameter that modules share is cast once
            self._tensors = {param: self._cast(param) for _, _, param in self._places}
        for slots, name, param in self._places:
            slots[name] = self._tensors[param]

    def _cast(self, param: Tensor) -> Tensor:
        if param not in self._sparse:
            return param.to(self._dtype)
        cast: Tensor = _SparseCast.apply(param, self._dtype)  # type: ignore[no-untyped-call]
        return cast

    def _take(self) -> None:
        for slots, name, param in self._places:
            if slots.get(name) is self._tensors[param]:  # not if something else was put there meanwhile
                slots[name] = param
        for known, lists in self._lists:
            known.update(lists)

    # ------------------------------------------------------------------ while a backward pass runs

    def return_in_backward(self, output: object) -> None:
        """Put the casts back in place while a backward pass through an output runs, and then let go of them.

        Args:
            output: whatever the forward pass gave; tensors in containers and dataclasses are found.
        """
        if not self._places or not torch.is_grad_enabled():
            return
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                untyped: Any = tensor
                untyped.register_hook(self._reached)

    def _reached(self, _: Tensor) -> None:
        """Put the casts back; called by an output's hook."""
        if self._phase is CastPhase.IN_BACKWARD:
            return
        with torch.enable_grad():  # a second pass through one graph finds none, and casts again
            self._put()
        self._phase = CastPhase.IN_BACKWARD
        when_backward_ends(self._leave, self._leave)

    def _leave(self) -> None:
        self._take()
        self._tensors = {}  # the output may be kept, and these with it
        self._phase = CastPhase.AWAY
