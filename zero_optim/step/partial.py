"""`PartialGradient`: ``param.grad`` on a rank without the whole reduced gradient.

Note [Partial gradients]
    ``param.grad`` must be neither None, which means "unused" to optimizers and ``GradScaler``, nor a tensor
    with a wrong norm. So it is a tensor without memory that holds the owned rows, if any. In-place
    elementwise operators work on those; others raise.

Note [Infinities in sharded gradients]
    ``GradScaler`` checks with one operator for each device and dtype. One rank may have the infinity, and all
    must skip the step. So partial gradients answer that operator with a collective, and so does
    `OwnedGradient` on a rank that owns every gradient of a dtype as a whole.
"""

import copy
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NoReturn, TypeAlias

import torch
from torch import Tensor

from zero_optim.comm.encoding import map_tensors, tensors_of
from zero_optim.compat import private
from zero_optim.compat.streams import HostCopy, copy_to
from zero_optim.dtensor.placement import is_dtensor, local_rows
from zero_optim.plan.pieces import Pieces, owned_by_text

Agree: TypeAlias = weakref.WeakMethod[Callable[[Tensor], None]]  # one for all gradients of a reducer

_UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"

# In place, each element alone, with numbers or 0-d tensors as arguments.
_PER_ELEMENT = frozenset(
    {
        _UNSCALE,
        "clamp_",
        "clamp_max_",
        "clamp_min_",
        "div_",
        "mul_",
        "nan_to_num_",
        "neg_",
        "zero_",
        *(f"_foreach_{name}_" for name in ("clamp_max", "clamp_min", "div", "mul", "neg", "zero")),
    }
)


class PartialGradient(Tensor):
    """A reduced gradient of which this rank holds some rows, or none: Note [Partial gradients].

    In-place elementwise operators work on these rows: ``zero_``, ``mul_`` and ``div_`` by a number,
    ``clamp_``, those of ``GradScaler``. ``zero_grad()`` drops it.
    """

    @staticmethod
    def __new__(cls: type["PartialGradient"], param: Tensor, *_: object, **__: object) -> "PartialGradient":
        """Make the tensor without memory."""
        make: Any = private.make_wrapper_subclass
        untyped: Any = Tensor.dtype
        of_param = untyped.__get__(param)  # also where this is a copy of another one
        gradient: PartialGradient = make(
            cls, param.shape, strides=param.stride(), dtype=of_param, device=param.device
        )
        return gradient

    def __init__(
        self,
        param: Tensor,
        pieces: Pieces,
        piece: Tensor | None,
        name: str,
        dtype: torch.dtype | None = None,
        comes: Callable[[], None] | None = None,
        agree: Agree | None = None,
    ) -> None:
        self.agree = agree
        self._rows = piece
        self._comes = comes
        self._dtype = param.dtype if dtype is None else dtype
        self._of = weakref.ref(param)
        self._pieces = pieces
        self._name = name

    __torch_function__ = private.or_none("disabled_torch_function_impl")

    @property
    def piece(self) -> Tensor | None:
        """This rank's rows, or None. The CPU waits for them."""
        if self._comes is not None and self._rows is not None:
            self._comes()
        return self._rows

    @property
    def rows_to_come(self) -> Tensor | None:
        """`piece` without a wait, for device work after the copy of the rows."""
        return self._rows

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """The dtype of the rows."""
        return self._dtype

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override] # noqa: ANN401
        here = "no rows here" if self._rows is None else f"{self._rows.shape[0]} rows here"
        kind = f"{tuple(self.shape)}, {self.dtype}, {self.device}"
        return f"PartialGradient({self._name}: {kind}, {owned_by_text(self._pieces)}, {here})"

    def __deepcopy__(self, memo: object) -> "PartialGradient":
        return self._with(None if self.piece is None else self.piece.detach().clone())

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        self._refuse("pickle")

    def share_memory_(self) -> NoReturn:
        """Raise RuntimeError: it has no memory, and PyTorch would crash."""
        self._refuse("share_memory_")

    def _with(self, piece: Tensor | None) -> "PartialGradient":
        return PartialGradient(self, self._pieces, piece, self._name, comes=self._comes, agree=self.agree)

    def drop(self) -> None:
        """Set ``param.grad`` to None, so that autograd begins anew."""
        param = self._of()
        if param is not None and param.grad is self:
            param.grad = None

    def _refuse(self, operator: str) -> NoReturn:
        first = (
            "Convert or move the model first, then build the optimizer. " if operator == "_to_copy" else ""
        )
        raise RuntimeError(
            f"{operator} of the gradient of {self._name} needs elements that this rank does not have: "
            f"gradients are sharded, and this one is {owned_by_text(self._pieces)}. {first}To clip, all "
            "ranks call optimizer.clip_grad_norm_(), in the place of torch.nn.utils.clip_grad_norm_(); it "
            "returns the norm to log, and changes nothing with max_norm=math.inf. To add several passes up "
            "leave that to ShardedDataParallel(accumulate=...). The rows of this rank are in "
            '".piece"; optimizer.owned_parameters() are those of which there are any'
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,  # noqa: ANN401 - PyTorch's
        types: object,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - what the operator returns
        """Run an elementwise operator on the owned rows; raise for any other."""
        name = func.overloadpacket.__name__
        first = args[0] if args else None
        if name == "detach" and isinstance(first, PartialGradient):
            return first._with(first._rows)
        if name == "detach_":
            return first
        beside = args[1:]
        others = tensors_of(list(beside))
        has_elements = any(isinstance(each, PartialGradient) or each.numel() > 1 for each in others)
        is_apt = name in _PER_ELEMENT and not has_elements
        if is_apt and isinstance(first, PartialGradient | list | tuple):
            return _run_on_rows(func, name, first, beside, kwargs or {})
        every = tensors_of([*args, *(kwargs or {}).values()])
        return next(each for each in every if isinstance(each, PartialGradient))._refuse(name)


def _run_on_rows(
    func: Callable[..., Any],
    name: str,
    first: Tensor | Sequence[Tensor],
    beside: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:  # noqa: ANN401 - what the operator returns
    """Run an in-place operator on the rows here of one gradient or a list."""
    grads = [first] if isinstance(first, Tensor) else first
    rows = [grad.piece if isinstance(grad, PartialGradient) else grad for grad in grads]
    result = None
    for on_host in (False, True):
        places = [n for n, row in enumerate(rows) if row is not None and is_on_host(grads[n]) == on_host]
        if not places:
            continue
        # A list argument has a number or 0-d tensor for each gradient.
        args = [[arg[n] for n in places] if isinstance(arg, list | tuple) else arg for arg in beside]
        near = map_tensors(args, lambda tensor: HostCopy(tensor).read()) if on_host else args
        some = [rows[n] for n in places]
        result = func(some if grads is first else some[0], *near, **kwargs)
        if on_host:
            for argument, target, used in zip(private.schema(func).arguments[1:], args, near, strict=False):
                writes = argument.alias_info is not None and argument.alias_info.is_write
                if writes and isinstance(target, Tensor):
                    copy_to(target, used)
    if name in ("zero_", "_foreach_zero_"):
        for grad in grads:
            if isinstance(grad, PartialGradient):
                grad.drop()
    if name == _UNSCALE:
        _agree(grads, beside[0])
    return result if grads is first else first


class OwnedGradient(Tensor):
    """A whole gradient on its only owner, until a step: Note [Infinities in sharded gradients]."""

    agree: Agree
    has_any: ClassVar[bool] = False  # whether this process has made one, as most have not

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,  # noqa: ANN401 - PyTorch's
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - what the operator returns
        """Run an operator as usual; ranks agree after one that looks for infinities."""
        result = private.disabled_torch_function_impl(func, types, tuple(args), kwargs or {})
        name = getattr(func, "__name__", "")
        if name == _UNSCALE:
            if not any(isinstance(grad, PartialGradient) for grad in args[0]):  # else these have agreed
                _agree(args[0], args[1])
        elif name in ("_values", "coalesce"):  # of a sparse one, which a scaler looks at
            result.__class__, result.agree = OwnedGradient, args[0].agree
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(self.detach(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:  # noqa: ANN401 - as there
        plain: Any = self.detach()
        return plain.__reduce_ex__(protocol)


def owned(grad: Tensor, agree: Agree | None) -> Tensor:
    """Turn a whole gradient into an `OwnedGradient`, in place; nothing without ``agree``."""
    if agree is not None:
        grad.__class__, OwnedGradient.has_any = OwnedGradient, True
        grad.agree = agree  # type: ignore[attr-defined] # it is one now
    return grad


def make_plain(params: Iterable[Tensor]) -> None:
    """Turn each `OwnedGradient` into an ordinary tensor, in place."""
    for param in params:
        grad: Any = param.grad
        if type(grad) is OwnedGradient:
            grad.__class__ = Tensor  # type: ignore[assignment] # mypy sees the class that it had


def rows_here(param: Tensor) -> Tensor | None:
    """Return the rows of the gradient that this rank has, as an ordinary tensor, or None."""
    grad = param.grad
    kind = type(grad)  # compared first, as clipping asks for every parameter
    if kind is Tensor or grad is None:
        return grad
    if isinstance(grad, PartialGradient):
        return grad.piece
    if kind is OwnedGradient:
        with private.DisableTorchFunctionSubclass():  # one operator for a list takes ordinary tensors alone
            return grad if grad.is_sparse else grad.detach()
    return local_rows(grad) if is_dtensor(grad) else grad


def _agree(grads: Iterable[Tensor], found_inf: Tensor) -> None:
    for grad in grads:
        reference = grad.agree if isinstance(grad, PartialGradient | OwnedGradient) else None
        agree = None if reference is None else reference()
        if agree is not None:
            agree(found_inf)
            return


def is_on_host(grad: Tensor | None) -> bool:
    """Whether a gradient is partial with its rows on the host, whatever the parameter's device."""
    return isinstance(grad, PartialGradient) and grad._comes is not None
