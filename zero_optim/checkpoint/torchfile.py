"""Files of ``torch.save`` and of safetensors, written and read tensor by tensor.

``torch.save`` is asked to leave the tensors' bytes out (``skip_data``), and a look at the file with fake
tensors tells where each belongs: so neither writing nor reading ever needs the whole in memory.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BufferedRandom, FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.serialization import skip_data

from zero_optim.checkpoint.content import EVERYWHERE, EXTRA, MODEL, OPTIMIZER, STATE
from zero_optim.checkpoint.data import bytes_of, write_all
from zero_optim.checkpoint.files import remove_stale_parts, replacing
from zero_optim.checkpoint.fitting import model_parts
from zero_optim.checkpoint.loading import with_strides
from zero_optim.checkpoint.names import positional
from zero_optim.checkpoint.safetensors import DTYPES, Box, lay_out, whole
from zero_optim.checkpoint.storage import CheckpointReader
from zero_optim.checkpoint.values import Json, key_of, pack
from zero_optim.comm.wire import inner_tensors, map_tensors, memory_of
from zero_optim.errors import CheckpointError
from zero_optim.plan.memory import dense_strides

Read = Callable[[str], Tensor]


def write_file(out: Path, reader: CheckpointReader, build: Callable[[Any], Any], read: Read) -> None:
    """Write a value whose tensors are read one by one; beside, then renamed into place.

    A link at ``out`` is replaced, not followed.

    Args:
        out: a ``.safetensors`` or any other file, for ``torch.load``.
        reader: of the checkpoint.
        build: makes the value, given what gives a tensor for a key and its strides.
        read: reads a tensor.

    Raises:
        CheckpointError: the file cannot be written.
    """
    try:
        remove_stale_parts(out)
        with replacing(out) as (file, beside):
            if out.suffix == ".safetensors":
                _write_safetensors(file, reader, read)
            else:
                _write_pt(file, beside, reader, build, read)
    except OSError as error:
        raise CheckpointError(f"cannot write {out}: {error.strerror or error}") from error


def _save(file: FileIO, value: object) -> None:
    buffered = BufferedRandom(file)  # writes until everything is written
    torch.save(value, buffered)
    buffered.detach()


def _write_pt(
    file: FileIO, path: Path, reader: CheckpointReader, build: Callable[[Any], Any], read: Read
) -> None:
    order: list[str] = []

    def reserve(key: str, strides: tuple[int, ...]) -> Tensor:
        order.append(key)
        blank = reader.blank(key)  # its memory is never touched, so it takes none
        return torch.empty_strided(blank.shape, strides, dtype=blank.dtype)

    if _needs_values(build, reader):
        _save(file, build(lambda key, strides: with_strides(read(key), strides)))
        return
    value = build(reserve)
    with skip_data():
        _save(file, value)
    del value
    fakes = inner_tensors(_without_bytes(path))
    assert len(fakes) == len(order)  # dicts keep their order
    for key, fake in zip(order, fakes, strict=True):
        file.seek(_offset(fake))
        write_all(file, _memory(with_strides(read(key), fake.stride())))


def _needs_values(build: Callable[[Any], Any], reader: CheckpointReader) -> bool:
    """Whether some tensors are inside others, sparse or wrapped, which cannot be made without values."""
    keys: list[str] = []

    def meta(key: str, strides: tuple[int, ...]) -> Tensor:
        keys.append(key)
        blank = reader.blank(key)
        return torch.empty_strided(blank.shape, strides, dtype=blank.dtype, device="meta")

    try:
        tensors = _tensors(build(meta))
    except (RuntimeError, TypeError, NotImplementedError):
        return True
    return len(tensors) != len(keys) or any(
        type(t) is not Tensor or t.layout != torch.strided for t in tensors
    )


def _tensors(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    children = (
        value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    )
    return [tensor for child in children for tensor in _tensors(child)]


def _without_bytes(path: Path) -> Any:  # noqa: ANN401 - whatever the file holds
    """Read a file of ``torch.save`` with tensors that have a place in the file instead of memory."""
    with FakeTensorMode():
        return torch.load(path, weights_only=True, map_location="cpu")


def _offset(fake: Tensor) -> int:
    storage: Any = fake.untyped_storage()
    return int(storage._checkpoint_offset) + int(fake.storage_offset()) * fake.itemsize


def _memory(tensor: Tensor) -> memoryview:
    run: Any = memory_of(tensor).numpy()
    return memoryview(run)


def _write_safetensors(file: FileIO, reader: CheckpointReader, read: Read) -> None:
    """Write the model's tensors, by name."""
    keys: dict[str, str] = {}
    for name, (kind, body) in model_parts(reader.manifest.values).items():
        if kind in ("sparse", "subclass", "wrapper"):
            raise CheckpointError(f"{name} is no plain tensor, as safetensors needs them: write a .pt file")
        if kind == "tensor":  # what else there is is extra state of a module
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
        write_all(file, bytes_of(read(keys[box.key])))


# ---------------------------------------------------------------------- into ours


@dataclass(frozen=True, slots=True)
class Source:
    """What a checkpoint is made of.

    Attributes:
        values: packed, by key.
        boxes: of each tensor the whole, by key.
        read: reads a tensor.
    """

    values: Mapping[str, Json]
    boxes: Mapping[str, Box]
    read: Read


def read_source(path: Path) -> Source:
    """Look at a file of ``torch.save``; its tensors are read when they are asked for.

    Raises:
        ValueError: it is no state dict, or one that only running code could read.
    """
    try:
        content = _without_bytes(path)
    except Exception as error:  # pickle and torch raise anything for files that are none
        raise ValueError(
            f"{path} is no file of torch.save that holds tensors and plain values only: {error}"
        ) from error
    values, tensors = _packed(content, path)

    def read(key: str) -> Tensor:
        fake = tensors[key]
        run = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype)
        left = _memory(run)
        with path.open("rb", buffering=0) as file:
            file.seek(_offset(fake))
            while left.nbytes and (count := file.readinto(left)):  # some 2 GiB at a time
                left = left[count:]
        if left.nbytes:
            raise CheckpointError(f"{path} is torn: it ends inside {key}")
        return run

    return Source(values, {key: whole(key, fake.dtype, fake.shape) for key, fake in tensors.items()}, read)


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
        values[key], found = _pack(key, value)
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


def _pack(key: str, value: object) -> tuple[Json, dict[str, Tensor]]:
    """Pack a value of fake tensors."""
    fakes: dict[int, Tensor] = {}

    def plain(fake: Tensor) -> Tensor:
        if fake.stride() != dense_strides(fake) and fake.numel():
            raise ValueError(
                f"{key} holds a tensor that is part of another, larger one: clone() it and save again"
            )
        meta = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device="meta")
        fakes[id(meta)] = fake
        return meta

    packed, tensors = pack(key, map_tensors(value, plain), key)
    return packed, {name: fakes[id(meta)] for name, meta in tensors.items()}
