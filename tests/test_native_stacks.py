"""What the tests' pool shows of a hung call beside Python's stacks."""

import os
import shutil
import socket
import subprocess
import sys

import pytest

from native_stacks import native_stacks


def test_the_stacks_of_a_process_in_its_c_code_are_shown_where_gdb_is_installed() -> None:
    command = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            shown = native_stacks(process.pid)
        finally:
            process.kill()
    if shutil.which("gdb") is None:
        assert "gdb is not installed" in shown
    else:
        assert "#0 " in shown or "no stacks in C++" in shown  # it may have no right to look


def test_data_that_nobody_reads_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as sender:
            receiver, _ = listener.accept()
            with receiver:
                sender.sendall(bytes(7))
                receiver.recv(1, socket.MSG_PEEK)  # it has arrived
                shown = native_stacks(os.getpid())
    assert "gdb is not installed" in shown
    [line] = [line for line in shown.splitlines() if line.startswith(f"0100007F:{port:04X} ")]
    assert line.endswith(" 00000000:00000007")
