"""What hooks remember about parameters between iterations, whatever buckets these are in.

PowerSGD and top-k use it. Nothing here communicates.

Note [Memories and buckets]

A reducer may change its buckets. PyTorch's does so after the first iteration, when it knows the order in
which gradients arrive. So memories are kept by parameter and not by bucket. Parameters get numbers in the
order in which the hook first sees them, which is the same on every rank. A checkpoint knows them by these
numbers. A new job starts with the reducer's first buckets again. So a restored state compares the shapes in
each bucket with those that it saw first, and refuses a difference. If names are given, they fit any buckets.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zero_optim.hooks.bucket import GradBucket

NamedParameters = Iterable[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Place:
    """Where the gradient of a parameter lies in a bucket.

    Args:
        number: of the parameter.
        offset: first element in the flat tensor.
        shape: of the gradient.
    """

    number: int
    offset: int
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()

    def of(self, flat: Tensor) -> Tensor:
        """View this part of a flat tensor, 1-D."""
        return flat.narrow(0, self.offset, self.numel)


@dataclass(slots=True)
class Register:
    """The numbers of the parameters, see Note [Memories and buckets].

    Args:
        first: for each bucket that had new parameters their shapes, in the order in which they were first
            seen.
        numbers: the number of each parameter.
        num_met: how many entries of ``first`` have been seen since this object was made or loaded.
    """

    first: list[list[tuple[int, ...]]] = field(default_factory=list)
    numbers: dict[Tensor, int] = field(default_factory=dict)
    num_met: int = 0

    def places(self, bucket: GradBucket) -> list[Place]:
        """Find out which parameters are in a bucket, and where. New parameters get numbers.

        Raises:
            ValueError: the state was loaded, and was saved with other parameters; or they are complex.
        """
        params = bucket.parameters()
        if params and params[0].is_complex():  # PyTorch's DDP shows them as real, but in the wrong places
            raise ValueError(
                f"expected gradients of real numbers, got {params[0].dtype} in bucket {bucket.index()}: make "
                "them so, or use allreduce_hook"
            )
        grads, start = bucket.gradients(), bucket.buffer().storage_offset()
        self._meet([param for param in params if param not in self.numbers])
        return [
            Place(self.numbers[param], int(grad.storage_offset() - start), tuple(grad.shape))
            for param, grad in zip(params, grads, strict=True)
        ]

    def _meet(self, params: list[Tensor]) -> None:
        if not params:
            return
        shapes = [tuple(param.shape) for param in params]
        if self.num_met == len(self.first):
            self.first.append(shapes)
        elif self.first[self.num_met] != shapes:
            raise ValueError(
                f"the hook's state was saved with parameters of shapes {self.first[self.num_met]} in bucket "
                f"{self.num_met}, and finds {shapes} there: use the same model and bucket sizes, or save and "
                "load the state with named_parameters=model.named_parameters()"
            )
        self.num_met += 1
        for param in params:
            self.numbers[param] = len(self.numbers)

    def state_dict(self, named_parameters: NamedParameters | None) -> dict[str, Any]:
        """Describe the parameters seen so far.

        Args:
            named_parameters: names for them, or None.
        """
        described: dict[str, Any] = {"first": [list(shapes) for shapes in self.first]}
        if named_parameters is not None:
            names = {self.numbers[param]: name for name, param in named_parameters if param in self.numbers}
            if len(names) < len(self.numbers):
                raise ValueError(
                    f"expected names for all {len(self.numbers)} parameters that the hook has met, got "
                    f"{len(names)}: pass named_parameters() of the model that is trained"
                )
            described["names"] = [names[number] for number in sorted(names)]
        return described

    def load_state_dict(self, described: Mapping[str, Any], named_parameters: NamedParameters | None) -> None:
        """Load a description: by names if it was saved with names and names are given here.

        Raises:
            ValueError: the parameters named, or those already seen, are not those of the description.
        """
        first = [[tuple(shape) for shape in shapes] for shapes in described["first"]]
        names = described.get("names")
        if named_parameters is not None and names is not None:
            shapes = [shape for bucket in first for shape in bucket]
            self.numbers = _numbered(names, shapes, dict(named_parameters))
            self.first, self.num_met = first, len(first)
        elif self.numbers and self.first != first:
            raise ValueError(
                f"expected the state of a hook that met parameters of shapes {self.first}, got one for "
                f"{first}: save and load it with named_parameters=model.named_parameters()"
            )
        else:
            self.first, self.num_met = first, len(first) if self.numbers else 0


def _numbered(
    names: list[str], shapes: list[tuple[int, ...]], params: Mapping[str, Tensor]
) -> dict[Tensor, int]:
    wrong = [
        f"{name} of shape {shape}"
        for name, shape in zip(names, shapes, strict=True)
        if name not in params or tuple(params[name].shape) != shape
    ]
    if wrong:
        raise ValueError(
            f"the hook's state is for parameters that named_parameters lacks: {', '.join(wrong)}"
        )
    return {params[name]: number for number, name in enumerate(names)}


@dataclass(slots=True)
class Errors:
    """What compression has left out so far, by parameter. The errors of a bucket lie in one flat tensor.

    Args:
        parts: 1-D, by parameter number; views of the flat tensors.
        flats: a flat tensor for each bucket, by the numbers of its parameters.
    """

    parts: dict[int, Tensor] = field(default_factory=dict)
    flats: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    def recall(self, places: list[Place], numel: int, like: Tensor) -> Tensor:
        """Return the errors of a bucket, which the caller changes in place; zeros at first.

        Args:
            places: of the parameters in the bucket.
            numel: length of the flat tensor, at least the bucket's.
            like: the bucket's buffer; the errors lie on its device, in `working_dtype`.
        """
        key, dtype = tuple(place.number for place in places), working_dtype(like.dtype)
        flat = self.flats.get(key)
        if flat is None or (flat.numel(), flat.device, flat.dtype) != (numel, like.device, dtype):
            flat = like.new_zeros(numel, dtype=dtype)
            for place in places:
                if place.number in self.parts:
                    place.of(flat).copy_(self.parts[place.number])
                self.parts[place.number] = place.of(flat)
            kept = {old: tensor for old, tensor in self.flats.items() if not set(old) & set(key)}
            self.flats = kept | {key: flat}
        return flat

    def state_dict(self) -> dict[int, Tensor]:
        """Copy all errors."""
        return {number: part.clone() for number, part in self.parts.items()}

    def load_state_dict(self, saved: Mapping[int, Tensor]) -> None:
        """Copy errors in."""
        self.parts = {number: part.clone() for number, part in saved.items()}
        self.flats = {}


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Choose the dtype to compute in: float64 for float64, else float32."""
    return torch.promote_types(dtype, torch.float32)


def forget_non_finite(tensor: Tensor) -> Tensor:
    """Replace infinities and NaNs by zero, in place.

    The gradient scaler skips an iteration whose gradients overflow. If its infinities stayed in the memory,
    they would come back in every later iteration.
    """
    return tensor.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def check_options(described: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Check that a saved state was made with the same options.

    Raises:
        ValueError: naming each option that differs.
    """
    wrong = [
        f"{name}={described.get(name)!r} saved, {value!r} here"
        for name, value in expected.items()
        if described.get(name) != value
    ]
    if wrong:
        raise ValueError(f"the saved state of the hook was made with other options: {'; '.join(wrong)}")
