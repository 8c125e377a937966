"""`return_freed_memory`: freed blocks go back to the system."""

import ctypes
import subprocess
import sys
from typing import Any

import pytest

import zero_optim

# Blocks of 4 MiB, every second one of which is freed. The C library has freed a larger one before. Each
# process does so once: a second time, blocks may lie where the first ones were, in the heap.
PROGRAM = """
import sys
from pathlib import Path
import torch, zero_optim

def resident_mib():
    # Without pages of files: the system drops those of libraries, and they come back.
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) // 1024

def left_mib():
    torch.ones(5 * 2**20)
    before = resident_mib()
    blocks = [torch.ones(2**20) for _ in range(32)]
    del blocks[::2]
    return resident_mib() - before

zero_optim.return_freed_memory()
print(left_mib())
"""


def left_mib() -> int:
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=100, check=False
    )
    assert found.returncode == 0, found.stderr
    return int(found.stdout)


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="the C library is not glibc"
)
def test_freed_memory_is_returned_once_that_is_asked_for() -> None:
    assert 50 < left_mib() < 80  # of 128 MiB the half that is in use; all without


@pytest.mark.parametrize("wrong", ["65536", 0])
def test_a_threshold_that_the_c_library_would_not_take_is_refused(wrong: Any) -> None:
    words = f"got {wrong}" if type(wrong) is int else "expected threshold to be a number of bytes"
    with pytest.raises(ValueError if type(wrong) is int else TypeError, match=words):
        zero_optim.return_freed_memory(wrong)
