"""Checkpoints of DeepSpeed's ZeRO, stages 1 to 3, and universal ones, are read from mapped files."""

import math
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from zero_optim.checkpoint.content import MODEL, OPTIMIZER, RankContent
from zero_optim.checkpoint.data import fill, lazy
from zero_optim.checkpoint.files import within
from zero_optim.checkpoint.formats.unpickling import tolerant
from zero_optim.checkpoint.sections import source_of
from zero_optim.step.leaves import MASTER

# What describes the run and its files, and is no state.
_CONFIG = (
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments",
    "shared_params", "sparse_tensor_module_names", "dp_world_size", "mp_world_size", "ds_config",
    "ds_version", "checkpoint_parallel_dimensions", "universal_checkpoint_info",
)  # fmt: skip
_Entries = dict[str, dict[str, Any]]  # name of a parameter -> name of an entry, with "fp32" for its value


def of_deepspeed(folder: Path) -> RankContent:
    """Open a checkpoint; ValueError if it has parts of other kinds of parallelism, or lacks a rank's file."""
    if (folder / "latest").is_file():
        folder = within(folder, (folder / "latest").read_text().strip())
    models, optims = _files(folder, "model"), _files(folder, "optim")
    first, groups = models[0], models[0]["param_shapes"]
    shapes = {name: tuple(shape) for group in groups for name, shape in group.items()}
    if (folder / "zero").is_dir():
        entries, options = _universal(folder / "zero", groups)
    elif optims and len(optims) == first["dp_world_size"]:
        entries, options = _sharded([each["optimizer_state_dict"] for each in optims], shapes)
    else:
        raise ValueError(f"it has {len(optims)} files of optimizer state, not {first['dp_world_size']}")
    weights, state = dict[str, Tensor](), dict[str, Any]()
    shared, frozen = first.get("shared_params") or {}, first["frozen_param_shapes"] or {}
    for name, param in first["module"].items():
        own, weights[name] = shared.get(name, name), param
        if own in entries and (param.numel() == 0 or param.dtype == entries[own]["fp32"].dtype):
            master = entries[own]["fp32"]
            weights[name] = lazy(param.dtype, master.shape, partial(fill, tensor=master))
        elif own in frozen and param.shape != frozen[own]:
            parts = [each["frozen_param_fragments"][own] for each in models]
            weights[name] = _whole([(part, 0, part.numel()) for part in parts], frozen[own])
    for name, of_name in entries.items():
        own = {key: value for key, value in of_name.items() if key != "fp32"}
        if first["module"][name].dtype != of_name["fp32"].dtype:
            own[MASTER] = of_name["fp32"]
        if own:
            state[name] = own
    param_groups = [{**own, "params": list(g)} for own, g in zip(options, groups, strict=True)]
    scaler = optims[0]["optimizer_state_dict"] if optims else {}
    rest = {key: value for key, value in first.items() if key not in _CONFIG}
    if scaler.get("dynamic_loss_scale"):
        rest["loss_scaler"] = vars(scaler["loss_scaler"])
    optimizer = {"state": state, "param_groups": param_groups}
    return source_of({**rest, MODEL: weights, OPTIMIZER: optimizer}, folder)


def _files(folder: Path, kind: str) -> list[Any]:
    files = dict[int, Any]()
    for path in sorted(folder.glob(f"*_{kind}_states.pt")):
        name = rf"(?:(?:bf16_|fp16_)?zero_pp_rank_([0-9]+)_)?mp_rank_00_{kind}_states\.pt"
        match = re.fullmatch(name, path.name)
        if match is None:
            raise ValueError(f"{path.name} is of tensor, pipeline or expert parallelism, which is not read")
        files[int(match[1] or 0)] = _load(path)
    lost = next((rank for rank in range(len(files)) if rank not in files), None)
    if lost is not None or (kind == "model" and not files):
        raise ValueError(f"the file of {kind} states of rank {lost or 0} is missing")
    return [files[rank] for rank in sorted(files)]


def _load(path: Path) -> Any:  # noqa: ANN401 - whatever was saved
    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except UnpicklingError:  # DeepSpeed's classes
        return torch.load(path, map_location="cpu", mmap=True, pickle_module=tolerant, weights_only=False)


def _whole(parts: list[tuple[Tensor, int, int]], shape: Sequence[int]) -> Tensor:
    """Stand for a tensor whose elements lie in these runs of flat ones; the last may be padded."""

    def join(whole: Tensor) -> None:
        run = torch.cat([flat.narrow(0, start, numel) for flat, start, numel in parts])
        whole.copy_(run[: math.prod(shape)].view(tuple(shape)))

    return lazy(parts[0][0].dtype, shape, join)


def _sharded(optims: list[Any], shapes: Mapping[str, tuple[int, ...]]) -> tuple[_Entries, list[Any]]:
    """Put together what the ranks have of flat partitions, and return it with the groups' options."""
    runs = dict[str, list[tuple[dict[str, Any], int, int]]]()  # flat tensors of a rank, first element, number
    for optim in optims:
        is_third = "fp32_flat_groups" in optim
        base = optim["optimizer_state_dict" if is_third else "base_optimizer_state"]
        values = optim["fp32_flat_groups" if is_third else "single_partition_of_fp32_groups"]
        if not isinstance(base, dict) or "state" not in base:
            raise ValueError(
                "it is an elastic checkpoint, which is not read: save it without elastic_checkpoint"
            )
        flats = [{"fp32": value, **base["state"].get(index, {})} for index, value in enumerate(values)]
        if not is_third:
            for flat, addresses in zip(flats, optim["param_slice_mappings"], strict=True):
                for name, address in addresses.items():
                    runs.setdefault(name, []).append((flat, address.start, address.numel))
            continue
        index = start = 0  # flat tensors have an equal part of each parameter, one after the other
        for name, shape in shapes.items():
            numel = -(-math.prod(shape) // len(optims))
            if start == flats[index]["fp32"].numel():
                index, start = index + 1, 0
            runs.setdefault(name, []).append((flats[index], start, numel))
            start += numel
    entries: _Entries = {}
    for name, parts in runs.items():
        entries[name] = {}
        for key, value in parts[0][0].items():
            if isinstance(value, Tensor) and value.ndim:  # of flat ones some are padded
                of_key = [(flat[key], start, numel) for flat, start, numel in parts]
                entries[name][key] = _whole(of_key, shapes[name])
            elif all(flat[key] == value for flat, _, _ in parts):
                entries[name][key] = value
            else:
                raise ValueError(f"{key} of {name} differs between ranks")
    return entries, base["param_groups"]


def _universal(folder: Path, groups: list[Any]) -> tuple[_Entries, list[Any]]:
    """Map what ds_to_universal wrote; of stage 3 it left the steps among the common state."""
    common, entries = _load(folder / "optimizer_state.pt"), _Entries()
    for index, group in enumerate(groups):
        for name, shape in group.items():
            entries[name] = {}
            for path in sorted(within(folder, name).glob("*.pt")):
                value = _load(path)
                value = value["param"] if isinstance(value, dict) else value
                entries[name][path.stem] = value if path.stem == "step" else value.view(tuple(shape))
            step = common.get("optimizer_state_dict", {}).get("state", {}).get(index, {}).get("step")
            if step is not None and len(entries[name]) > 1:
                entries[name].setdefault("step", step)
    return entries, common["param_groups"]
