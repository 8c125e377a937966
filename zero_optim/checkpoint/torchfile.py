"""Files of ``torch.save`` and safetensors, with one tensor in memory at a time.

``torch.save`` and ``torch.load`` work on tensors that are mapped from files. The system reads their pages
when they are used, and drops them when memory is needed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedRandom, FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero_optim.checkpoint.content import EVERYWHERE, EXTRA, MODEL, OPTIMIZER, STATE
from zero_optim.checkpoint.data import bytes_of, map_file, tensor_in, write_all
from zero_optim.checkpoint.files import open_part, remove_stale_parts, replacing
from zero_optim.checkpoint.fitting import model_parts
from zero_optim.checkpoint.names import positional
from zero_optim.checkpoint.reading import with_strides
from zero_optim.checkpoint.safetensors import DTYPES, Box, lay_out, whole
from zero_optim.checkpoint.storage import CheckpointReader
from zero_optim.checkpoint.values import Json, key_of, pack
from zero_optim.comm.wire import memory_of
from zero_optim.errors import CheckpointError

Advance = Callable[[int], object]


def write_file(out: Path, reader: CheckpointReader, build: Callable[[Any], Any], advance: Advance) -> None:
    """Write a checkpoint's optimizer or model to one file, which is renamed into place at the end.

    A link at ``out`` is replaced, not followed.

    Args:
        out: a ``.safetensors`` file, which gets the model's tensors, or any other, for ``torch.load``.
        reader: of the checkpoint.
        build: makes the value; its argument returns the tensor of a key, with strides.
        advance: called with the number of bytes read.

    Raises:
        CheckpointError: the file cannot be written.
    """
    try:
        remove_stale_parts(out)
        with replacing(out) as file:
            if out.suffix == ".safetensors":
                _write_safetensors(file, reader, advance)
            else:
                _write_pt(file, out, reader, build, advance)
    except OSError as error:
        raise CheckpointError(f"cannot write {out}: {error.strerror or error}") from error


def _write_pt(
    file: FileIO, out: Path, reader: CheckpointReader, build: Callable[[Any], Any], advance: Advance
) -> None:
    """Write with ``torch.save``, which takes each tensor's bytes from its mapped file when it writes them."""

    def mapped(key: str, strides: Sequence[int]) -> Tensor:
        tensor = reader.map_tensor(key)
        if tensor.stride() != tuple(strides) and tensor.numel():
            tensor = _spooled(with_strides(tensor, strides), out)
        advance(tensor.nbytes)
        return tensor

    buffered = BufferedRandom(file)  # a write writes everything
    torch.save(build(mapped), buffered)
    buffered.detach()


def _spooled(tensor: Tensor, out: Path) -> Tensor:
    """Map a tensor from a temporary file without a name, to which its memory is written."""
    path, file = open_part(out)
    try:
        with file:
            run: Any = memory_of(tensor).numpy()
            write_all(file, memoryview(run))
        return tensor_in(map_file(path, tensor.nbytes), tensor.dtype, tensor.shape, tensor.stride())
    finally:
        path.unlink(missing_ok=True)


def _write_safetensors(file: FileIO, reader: CheckpointReader, advance: Advance) -> None:
    """Write the model's tensors, by name."""
    keys: dict[str, str] = {}
    for name, (kind, body) in model_parts(reader.manifest.values).items():
        if kind in ("sparse", "subclass", "wrapper"):
            raise CheckpointError(f"{name} is no plain tensor, as safetensors needs them: write a .pt file")
        if kind == "tensor":  # other values are extra state of a module
            keys[name] = body[0]
    entries = reader.manifest.entries
    boxes = [whole(name, entries[key].dtype, entries[key].shape) for name, key in keys.items()]
    for box in boxes:
        if box.dtype not in DTYPES:
            raise CheckpointError(
                f"{box.name} is of {box.dtype}, for which safetensors has no name: write a .pt file"
            )
    head, placed = lay_out(boxes)
    write_all(file, memoryview(head))
    for box, _ in placed:
        write_all(file, bytes_of(reader.read_tensor(keys[box.key])))
        advance(box.nbytes)


# ---------------------------------------------------------------------- into ours


@dataclass(frozen=True, slots=True)
class Source:
    """What a checkpoint is made of.

    Attributes:
        values: packed, by key.
        boxes: whole tensors, by key.
        read: reads a tensor.
    """

    values: Mapping[str, Json]
    boxes: Mapping[str, Box]
    read: Callable[[str], Tensor]


def read_source(path: Path) -> Source:
    """Open a file of ``torch.save``. Its tensors are mapped, and read when they are used.

    Raises:
        ValueError: it is not a state dict, or reading it would run code.
    """
    try:
        content = torch.load(path, mmap=True, weights_only=True, map_location="cpu")
    except Exception as error:  # pickle and torch raise anything for other files
        raise ValueError(
            f"{path} is no file of torch.save that holds tensors and plain values only: {error}"
        ) from error
    values, tensors = _packed(content, path)
    boxes = {key: whole(key, tensor.dtype, tensor.shape) for key, tensor in tensors.items()}
    return Source(values, boxes, tensors.__getitem__)


def _packed(content: Any, path: Path) -> tuple[dict[str, Json], dict[str, Tensor]]:  # noqa: ANN401
    """Find the sections in what a file holds."""
    sections = content if isinstance(content, dict) else {}
    if {"state", "param_groups"} <= sections.keys():
        sections = {OPTIMIZER: sections}
    elif sections and all(isinstance(value, Tensor) for value in sections.values()):
        sections = {MODEL: sections}
    values: dict[str, Json] = {}
    tensors: dict[str, Tensor] = {}

    def add(key: str, value: object) -> None:
        values[key], found = pack(key, value, key)
        tensors.update(found)

    if isinstance(sections.get(MODEL), Mapping):
        add(MODEL, dict(sections[MODEL]))
    optimizer = sections.get(OPTIMIZER)
    if isinstance(optimizer, Mapping) and {"state", "param_groups"} <= optimizer.keys():
        values[OPTIMIZER] = _pack_optimizer(optimizer, add, values)
    if not values:
        raise ValueError(f"{path} holds neither an optimizer's state dict nor a model's")
    add(EXTRA, None)
    return values, tensors


def _pack_optimizer(
    state_dict: Mapping[str, Any], add: Callable[[str, object], None], values: dict[str, Json]
) -> Json:
    groups, known = [], dict[Any, str]()
    for number, group in enumerate(state_dict["param_groups"]):
        names = group.get("param_names") or [
            positional(number, place) for place in range(len(group["params"]))
        ]
        known.update(zip(group["params"], names, strict=True))
        key = key_of(OPTIMIZER, "options", str(number))
        add(key, {k: v for k, v in group.items() if k not in ("params", "param_names")})
        groups.append({"names": names, "options": values.pop(key)})
    state = state_dict["state"]
    for index, name in known.items():
        if index in state:
            add(f"{STATE}/{key_of(name)}", state[index])
    add(EVERYWHERE, {key: value for key, value in state.items() if key not in known})
    named = all("param_names" in group for group in state_dict["param_groups"])
    return {"named": named, "groups": groups, "params": {}}
