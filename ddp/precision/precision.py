"""`PrecisionPolicy`: in which dtypes a model computes, is sent, and reduces gradients."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from zero_optim.compat import private
from zero_optim.compat.engine import eager
from zero_optim.ddp.precision.casting import cast_buffers
from zero_optim.ddp.reducer.graph import replaced
from zero_optim.plan.groups import names_text

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_WHERE = ("model", "units", "nowhere")


@dataclass(frozen=True, slots=True)
class PrecisionPolicy:
    """Which dtypes `FullyShardedDataParallel` uses for what; None leaves things in their own.

    Only floating-point tensors are cast. Owners keep their rows of the parameters as they were, and step
    these: build the model in float32, and compute in less::

        policy = PrecisionPolicy(params=torch.bfloat16, gradients=torch.float32)
        model = FullyShardedDataParallel(module, optimizer, mixed_precision=policy)

    Attributes:
        params: the parameters' while they are computed with, and the one in which they are gathered. The
            parameters of the model have it from then on: ``param.dtype``. State dicts and checkpoints have
            the values, and the dtype, that owners keep.
        gradients: the one in which gradients are sent to their owners and added up; None for ``params``.
            Owners keep the sums in it, or in the dtype in which they keep the parameter if that is wider.
        buffers: what buffers are cast to, once and for all.
        inputs: what the inputs of the model are cast to; None for ``params``.
        outputs: what the outputs of the model are cast to.
        casts_inputs: where inputs are cast: those of the "model", those of all "units" (to ``params`` below
            the model), or "nowhere".

    Raises:
        TypeError: a dtype is none.
        ValueError: nothing can be computed in a dtype; or inputs are to be cast nowhere, and to a dtype.
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
            _check_dtype(name, dtype)
        if self.casts_inputs not in _WHERE:
            raise ValueError(f"expected casts_inputs to be one of {_WHERE}, got {self.casts_inputs!r}")
        if self.casts_inputs == "nowhere" and self.inputs is not None:
            raise ValueError(f'inputs={self.inputs} has no effect with casts_inputs="nowhere": leave one out')

    @classmethod
    def of(cls, policy: object, module: nn.Module) -> "PrecisionPolicy | None":
        """Read the argument ``mixed_precision`` of `FullyShardedDataParallel`: a policy, or None.

        PyTorch's ``MixedPrecisionPolicy``, ``MixedPrecision`` and ``_MixedPrecision`` are read by attributes.
        """
        if policy is None or isinstance(policy, cls):
            return policy
        untyped: Any = policy
        if not hasattr(policy, "param_dtype") or not hasattr(policy, "reduce_dtype"):
            raise TypeError(
                "expected mixed_precision to be a zero_optim.ddp.PrecisionPolicy or a "
                f"torch.distributed.fsdp.MixedPrecisionPolicy, got {type(policy).__name__}"
            )
        if getattr(policy, "keep_low_precision_grads", False):
            raise ValueError(
                "keep_low_precision_grads=True is not possible: owners keep gradients in the dtype of what "
                "they step. Leave it out"
            )
        classes = tuple(getattr(policy, "_module_classes_to_ignore", ()))
        left_out = [name for name, layer in module.named_modules() if isinstance(layer, classes)]
        if left_out and untyped.param_dtype is not None:
            raise ValueError(
                "torch.distributed.fsdp.MixedPrecision leaves out modules of some classes, as "
                f"{names_text(left_out)}, which is not possible here: give a zero_optim.ddp.PrecisionPolicy, "
                "which leaves out none"
            )
        casts_model = getattr(policy, "cast_root_forward_inputs", not hasattr(policy, "cast_forward_inputs"))
        casts_units = getattr(policy, "cast_forward_inputs", False)
        return cls(
            params=untyped.param_dtype,
            gradients=untyped.reduce_dtype,
            buffers=getattr(policy, "buffer_dtype", None),
            outputs=getattr(policy, "output_dtype", None),
            casts_inputs="units" if casts_units else "model" if casts_model else "nowhere",
        )

    @classmethod
    def of_ddp(cls, arguments: Mapping[str, Any]) -> "PrecisionPolicy | None":
        """Read ``mixed_precision`` of DDP, and check it with the other arguments, by name."""
        policy, module = arguments.get("mixed_precision"), arguments["module"]
        if policy is None:
            return None
        if not isinstance(policy, private.MixedPrecision):
            raise TypeError(
                "expected mixed_precision to be a torch.nn.parallel.distributed._MixedPrecision, got "
                f"{type(policy).__name__}"
            )
        for name in ("param_dtype", "reduce_dtype", "buffer_dtype"):
            _check_dtype(f"mixed_precision's {name}", getattr(policy, name))
        if arguments.get("delay_all_reduce_named_params"):
            raise ValueError(
                "mixed_precision does not go with delay_all_reduce_named_params: these gradients are reduced "
                "in the parameters' own dtype. Leave one of the two out"
            )
        if any(isinstance(layer, torch.jit.ScriptModule) for layer in module.modules()):
            raise TypeError(
                "mixed_precision cannot cast the parameters of modules compiled by TorchScript: wrap the "
                "model itself, or use torch.compile"
            )
        return cls.of(policy, module)

    def describe(self) -> str:
        """Describe it, for ranks to compare."""
        return ", ".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        """In which gradients are reduced; None for the parameters' own."""
        return self.params if self.gradients is None else self.gradients

    def check(self, names: Mapping[Tensor, str], sparse: Collection[str], accumulate: str) -> None:
        """Refuse what does not fit a model, whose sharded parameters have ``names``."""
        if self.params is None:
            return
        wrong = [
            name
            for param, name in names.items()
            if param.is_floating_point() and torch.promote_types(self.params, param.dtype) != param.dtype
        ]
        if wrong:
            raise ValueError(
                f"params={self.params} cannot hold what owners keep of {names_text(wrong)}, or is wider than "
                "that. They keep parameters as they are in the model: convert it to float32 first, then "
                "build the optimizer"
            )
        if any(self.narrows(param) and name in sparse for param, name in names.items()):
            raise ValueError(
                f"params={self.params} does not go with sparse gradients, which are kept in the dtype of "
                "their parameters: use sparse=False, or leave mixed_precision out"
            )
        reduced = self.reduce_dtype
        if accumulate == "local" and torch.promote_types(self.params, reduced or self.params) != self.params:
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

    # ------------------------------------------------------------------ casts

    def cast_for_good(self, module: nn.Module, ignored: Collection[str]) -> None:
        """Cast the buffers of a model, and parameters that no optimizer has."""
        cast_buffers(module, self.buffers, ignored)
        for name, param in module.named_parameters():
            if self.params and self.narrows(param) and name not in ignored:
                param.data = param.data.to(self.params)

    def hook_up(self, modules: Iterable[nn.Module]) -> None:
        """Register the hooks that cast inputs and outputs of units, the outermost first."""
        outermost, *inner = modules
        of_model = self.params if self.inputs is None else self.inputs
        if of_model is not None and self.casts_inputs != "nowhere":
            outermost.register_forward_pre_hook(partial(_cast_inputs, of_model), with_kwargs=True)
        if self.params is not None and self.casts_inputs == "units":
            for module in inner:
                module.register_forward_pre_hook(partial(_cast_inputs, self.params), with_kwargs=True)
        if self.outputs is not None:
            outermost.register_forward_hook(partial(_cast_outputs, self.outputs))


def sparse_names(model: nn.Module) -> set[str]:
    """Return the names of parameters with sparse gradients, as PyTorch's DDP finds them."""
    return {
        own
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
        for own, _ in module.named_parameters(name, recurse=False)
    }


def _check_dtype(name: str, dtype: object) -> None:
    if dtype not in (None, *_DTYPES):
        raise ValueError(
            f"expected {name} to be None or one of {', '.join(map(str, _DTYPES))}, got {dtype!r}"
        )


@eager
def _cast_outputs(dtype: torch.dtype, module: nn.Module, inputs: object, output: Any) -> Any:  # noqa: ANN401
    return replaced(output, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def _cast_inputs(dtype: torch.dtype, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:  # noqa: ANN401
    result: tuple[Any, Any] = _cast_outputs(dtype, module, None, (args, kwargs))
    return result
