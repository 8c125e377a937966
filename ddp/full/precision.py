"""`PrecisionPolicy`: in which dtypes a model computes, is sent, and reduces gradients."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from zero_optim.compat.autograd import eager
from zero_optim.ddp.reducer.graph import replaced
from zero_optim.plan.groups import names_text

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_WHERE = ("model", "units", "nowhere")


@dataclass(frozen=True, slots=True)
class PrecisionPolicy:
    """The dtypes that `FullyShardedDataParallel` computes and reduces in; None leaves tensors in their own.

    Only floating-point tensors are cast. Owners keep and step their rows of the parameters in the dtype of
    the model::

        policy = PrecisionPolicy(params=torch.bfloat16, gradients=torch.float32)
        model = FullyShardedDataParallel(module, optimizer, mixed_precision=policy)

    Attributes:
        params: for gathers and the computation; ``param.dtype`` from then on. State dicts and checkpoints
            have the values, and the dtype, that owners keep.
        gradients: for the reduction of gradients; None for ``params``. Owners keep the sums in it, or in the
            dtype in which they keep the parameter if that is wider.
        buffers: of buffers, which are cast once.
        inputs: of the model's inputs; None for ``params``.
        outputs: of the model's outputs.
        casts_inputs: whose inputs are cast: the "model"'s, those of all "units" (to ``params`` below the
            model), or "nowhere".

    Raises:
        TypeError: a dtype is none.
        ValueError: a dtype is no floating-point one; or inputs are cast nowhere, and to a dtype.
    """

    params: torch.dtype | None = None
    gradients: torch.dtype | None = None
    buffers: torch.dtype | None = None
    inputs: torch.dtype | None = None
    outputs: torch.dtype | None = None
    casts_inputs: Literal["model", "units", "nowhere"] = "model"

    def __post_init__(self) -> None:
        for name in ("params", "gradients", "buffers", "inputs", "outputs"):
            dtype = getattr(self, name)
            if dtype is not None and not isinstance(dtype, torch.dtype):
                raise TypeError(f"expected {name} to be a torch.dtype or None, got {dtype!r}")
            if dtype not in (None, *_DTYPES):
                among = ", ".join(map(str, _DTYPES))
                raise ValueError(f"expected {name} to be None or one of {among}, got {dtype!r}")
        if self.casts_inputs not in _WHERE:
            raise ValueError(f"expected casts_inputs to be one of {_WHERE}, got {self.casts_inputs!r}")
        if self.casts_inputs == "nowhere" and self.inputs is not None:
            raise ValueError(f'inputs={self.inputs} has no effect with casts_inputs="nowhere": leave one out')

    @classmethod
    def of(cls, policy: object) -> "PrecisionPolicy":
        """Read the argument ``mixed_precision``: a policy, one of FSDP2's (by attributes), or None."""
        if policy is None or isinstance(policy, cls):
            return policy or cls()
        untyped: Any = policy
        if not hasattr(policy, "param_dtype") or not hasattr(policy, "output_dtype"):
            raise TypeError(
                "expected mixed_precision to be a zero_optim.ddp.PrecisionPolicy or a "
                f"torch.distributed.fsdp.MixedPrecisionPolicy, got {type(policy).__name__}"
            )
        return cls(
            params=untyped.param_dtype,
            gradients=untyped.reduce_dtype,
            outputs=untyped.output_dtype,
            casts_inputs="units" if untyped.cast_forward_inputs else "nowhere",
        )

    def describe(self) -> str:
        """Describe it, for ranks to compare."""
        return ", ".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        """In which gradients are reduced; None for the parameters' own."""
        return self.gradients or self.params

    def check(self, names: Mapping[Tensor, str], sparse: Collection[str], accumulate: str) -> None:
        """Refuse what does not fit a model, whose sharded parameters have ``names``."""
        if self.params is None:
            return
        narrowed = {param: name for param, name in names.items() if self.narrows(param)}
        wrong = [
            name
            for param, name in narrowed.items()
            if torch.promote_types(self.params, param.dtype) != param.dtype
        ]
        if wrong:
            raise ValueError(
                f"params={self.params} cannot hold what owners keep of {names_text(wrong)}, or is wider than "
                "that. They keep parameters as they are in the model: convert it to float32 first, then "
                "build the optimizer"
            )
        if any(name in sparse for name in narrowed.values()):
            raise ValueError(
                f"params={self.params} does not go with sparse gradients, which are kept in the dtype of "
                "their parameters: use sparse=False, or leave mixed_precision out"
            )
        reduced = self.gradients or self.params
        if accumulate == "local" and torch.promote_types(self.params, reduced) != self.params:
            raise ValueError(
                f'accumulate="local" adds up the gradients of several passes in {self.params}, as autograd '
                f'does, and gradients={reduced} asks for more: use accumulate="owner", which adds up what '
                f"was reduced, or gradients={self.params}"
            )

    def narrows(self, param: Tensor) -> bool:
        """Whether a parameter is computed with in another dtype than its own."""
        return param.is_floating_point() and self.params not in (None, param.dtype)

    def compute_dtypes(self, params: Iterable[Tensor]) -> dict[Tensor, torch.dtype]:
        """Return the dtypes of the parameters that get another one."""
        return {param: self.params for param in params if self.params and self.narrows(param)}

    def cast_for_good(self, module: nn.Module, ignored: Collection[str]) -> None:
        """Cast the buffers of a model, and parameters that no optimizer has."""
        for name, buffer in module.named_buffers():
            if self.buffers and buffer.is_floating_point() and name not in ignored:
                buffer.data = buffer.to(self.buffers)
        for name, param in module.named_parameters():
            if self.params and self.narrows(param) and name not in ignored:
                param.data = param.data.to(self.params)

    def hook_up(self, modules: Iterable[nn.Module]) -> None:
        """Register the hooks that cast inputs and outputs of units, the outermost first."""
        outermost, *inner = modules
        of_model = self.inputs or self.params
        if of_model is not None and self.casts_inputs != "nowhere":
            outermost.register_forward_pre_hook(partial(_cast_inputs, of_model), with_kwargs=True)
        if self.params is not None and self.casts_inputs == "units":
            for module in inner:
                module.register_forward_pre_hook(partial(_cast_inputs, self.params), with_kwargs=True)
        if self.outputs is not None:
            outermost.register_forward_hook(partial(_cast_outputs, self.outputs))


@eager
def _cast_outputs(dtype: torch.dtype, module: nn.Module, inputs: object, output: Any) -> Any:  # noqa: ANN401
    return replaced(output, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def _cast_inputs(dtype: torch.dtype, module: nn.Module, args: Any, kwargs: Any) -> Any:  # noqa: ANN401
    return _cast_outputs(dtype, module, None, (args, kwargs))
