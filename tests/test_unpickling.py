"""Files made to do harm are refused, change nothing outside, and take no memory."""

import io
import pickle
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import metadata as meta
from torch.distributed.checkpoint.filesystem import _StorageInfo

from test_checkpoint_hostile import write
from zero_optim import CheckpointError, checkpoint
from zero_optim.checkpoint.formats.unpickling import SafeUnpickler, tolerant
from zero_optim.checkpoint.offline import convert

BOTH = pytest.mark.parametrize("unpickler", [SafeUnpickler, tolerant.Unpickler])


def peak_of(call: Callable[[], object]) -> int:
    """Return how many bytes a call that raises has allocated at most."""
    tracemalloc.start()
    with pytest.raises((pickle.UnpicklingError, CheckpointError)):
        call()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


@BOTH
@pytest.mark.parametrize(
    "shared",
    ["torch\nTensor", "torch._utils\n_rebuild_tensor_v2", "torch\nfloat32", f"{meta.__name__}\nMetadata"],
)
def test_a_pickle_sets_no_attribute_of_a_class_or_function(unpickler: Any, shared: str) -> None:
    state = b"N}X\x07\x00\x00\x00plantedK\x01s\x86"
    with pytest.raises(pickle.UnpicklingError, match="which is not its own"):
        unpickler(io.BytesIO(b"\x80\x02c" + shared.encode() + b"\n" + state + b"b.")).load()
    assert not hasattr(torch.Tensor, "planted")
    assert not hasattr(meta.Metadata, "planted")


@BOTH
def test_a_large_memo_index_takes_no_memory(unpickler: Any) -> None:
    octets = b"\x80\x02Nr\xff\xff\xff\x03cos\nsystem\n"
    assert peak_of(lambda: SafeUnpickler(io.BytesIO(octets)).load()) < 2**20
    assert unpickler(io.BytesIO(b"\x80\x02Nr\xff\xff\xff\x03.")).load() is None


def test_names_that_lead_out_of_the_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "outside").write_bytes(b"")
    theirs = tmp_path / "deepspeed"
    theirs.mkdir()
    dcp = tmp_path / "dcp"
    dcp.mkdir()
    for name in ("../outside", str(tmp_path / "outside")):
        (theirs / "latest").write_text(name)
        index = meta.MetadataIndex("a")
        place = {index: _StorageInfo(name, 0, 4)}
        (dcp / ".metadata").write_bytes(
            pickle.dumps(meta.Metadata({"a": meta.BytesStorageMetadata()}, {}, place))
        )
        for folder in (theirs, dcp):
            with pytest.raises(CheckpointError, match="which is outside of"):
                convert(folder, tmp_path / "out.pt", "torch")


def test_a_manifest_of_empty_lists_is_refused_before_they_take_memory(tmp_path: Path) -> None:
    body = "[" + ",".join(["[]"] * (2**23 // 3)) + "]"
    write(tmp_path, body)
    with pytest.raises(CheckpointError, match="too many empty lists"):
        checkpoint.peek(tmp_path)
    assert peak_of(lambda: checkpoint.peek(tmp_path)) < 64 * 2**20
