"""The model, the schedule, the records, and what is printed."""

import io
import json
import os
import re
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from rich.console import Console

from zero_optim.demo import optimizers, text, trace
from zero_optim.demo.config import ModelShape
from zero_optim.demo.model import GPT, generate
from zero_optim.demo.prepare import METRICS
from zero_optim.demo.report import Display, Metric, Records, Shard, clock
from zero_optim.demo.text import Samples
from zero_optim.demo.trace import Span
from zero_optim.demo.train import FINAL, rate_factor
from zero_optim.errors import RemoteRankError, StalledError, heard_of
from zero_optim.run import host

SHAPE = ModelShape(context=16, layers=2, width=16, heads=2)


def model() -> GPT:
    torch.manual_seed(0)
    made = GPT(SHAPE)
    for parameter in made.parameters():  # blocks end in zeros at first: then nothing would be tested
        torch.nn.init.normal_(parameter, std=0.3)
    return made


def tokens(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(256, (2, count), generator=torch.Generator().manual_seed(seed))


def test_the_model_is_made_of_matrices_only() -> None:
    assert {parameter.ndim for parameter in model().parameters()} == {2}
    assert list(model().buffers()) == []


def test_a_position_sees_what_came_before_it_and_nothing_after() -> None:
    one, other = tokens(16), tokens(16)
    other[:, 10:] = tokens(6, seed=1)
    gpt = model()
    assert torch.allclose(gpt(one)[:, :10], gpt(other)[:, :10], atol=1e-5)
    other[:, 0] += 1
    assert not torch.allclose(gpt(one)[:, 9], gpt(other % 256)[:, 9], atol=1e-3)


def test_the_order_of_what_came_before_matters() -> None:
    one = tokens(8)
    swapped = one[:, [1, 0, 2, 3, 4, 5, 6, 7]]
    assert not torch.allclose(model()(one)[:, -1], model()(swapped)[:, -1], atol=1e-3)


def test_generated_text_goes_on_beyond_the_context_and_repeats_with_its_seed() -> None:
    prompt = torch.tensor([65], dtype=torch.uint8)
    one = generate(model(), prompt, 20, seed=3)
    assert len(one) == 20
    assert generate(model(), prompt, 20, seed=3) == one
    assert generate(model(), prompt, 20, seed=4) != one
    assert generate(model(), prompt, 0, seed=3) == b""


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant"])
def test_the_learning_rate_rises_then_follows_its_schedule(kind: str) -> None:
    factors = [rate_factor(step, kind, warmup=4, steps=20) for step in range(20)]
    assert factors[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert factors[-1] == pytest.approx(1.0 if kind == "constant" else FINAL)
    assert factors[4:] == sorted(factors[4:], reverse=True)
    assert factors[8] == pytest.approx({"cosine": 0.851, "linear": 0.76, "constant": 1.0}[kind], abs=1e-3)


@pytest.mark.parametrize(("warmup", "steps"), [(0, 1), (5, 3), (3, 3)])
def test_short_runs_have_a_schedule_too(warmup: int, steps: int) -> None:
    factors = [rate_factor(step, "cosine", warmup, steps) for step in range(steps)]
    assert all(0 < factor <= 1 for factor in factors)


def test_records_go_on_after_the_checkpoint_without_a_step_twice(tmp_path: Path) -> None:
    records = Records(tmp_path)
    for step in range(6):
        records.append(Metric(step=step, train_loss=1.5 * step))
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"step": 6, "train_lo')  # what a killed process may leave
    Records(tmp_path, tmp_path, through=3).append(Metric(step=4, val_loss=0.1 + 0.2))
    lines = [json.loads(line) for line in (tmp_path / METRICS).read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    assert lines[-1] == {"step": 4, "val_loss": 0.1 + 0.2}
    assert Records(tmp_path, tmp_path, through=9).validations() == [(4, 0.1 + 0.2)]


def test_a_line_that_is_no_record_is_refused_unless_it_is_the_last(tmp_path: Path) -> None:
    (tmp_path / METRICS).write_text('{"step": 1}\nhello\n{"step": 2}\n')
    with pytest.raises(ValueError, match="line 2 is no record"):
        Records(tmp_path, tmp_path, through=9)
    assert Records(tmp_path, tmp_path / "nowhere", through=9).metrics == []


def printed(*shards: Shard, terminal: bool = False) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=100, highlight=False)
    display = Display(0, 100, console)
    display.shards(shards)
    display.fact("run folder", "path/" * 30)
    display.sample("start", "add\x1b[2Jed[b]")
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_the_summary_has_a_line_for_each_rank_and_keeps_paths_whole(terminal: bool) -> None:
    shown = printed(Shard(10, 80), Shard(30, 240), terminal=terminal)
    rows = [line.split() for line in shown.splitlines() if "25.0%" in line or "75.0%" in line]
    assert rows == [["0", "10", "80", "B", "320", "B", "25.0%"], ["1", "30", "240", "B", "320", "B", "75.0%"]]
    assert "path/" * 30 in shown
    assert "ed[b]" in shown  # the model's text is no markup
    assert "\x1b[2J" not in shown  # and moves no cursor
    assert "gradients held" not in shown
    assert "a rank keeps" not in shown
    shown = printed(Shard(10, 80, 40), Shard(30, 0, 0), terminal=terminal)
    assert "gradients held" in shown
    rows = [line.split() for line in shown.splitlines() if "80 B" in line]
    assert [row[-2:] for row in rows] == [["40", "B"], ["0", "B"]]
    assert "a rank keeps" not in shown


def test_the_summary_shows_the_parameters_that_ranks_keep_and_the_most_that_is_whole_at_once() -> None:
    shown = printed(Shard(10, 80, 40, 40, 100), Shard(30, 240, 120, 120, 60))
    line = "parameters  a rank keeps at most 120 B of 160 B; blocks in use take at most 100 B"
    assert line in shown.splitlines()


def test_plain_lines_are_few_and_show_every_validation() -> None:
    console = Console(file=io.StringIO(), width=100)
    with Display(0, 100, console) as lines:
        lines.update(Metric(step=0, val_loss=5.5))
        for step in range(1, 101):
            val = 2.0 if step == 33 else None
            lines.update(Metric(step=step, train_loss=3.0, tokens_per_second=12345.6, val_loss=val))
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue().splitlines()
    assert len(shown) == 22
    assert "update  33/100   loss 3.000   12,346 tokens/s" in shown[7]
    assert shown[7].endswith("validation 2.000")


@pytest.mark.parametrize(("seconds", "shown"), [(0.4, "0:00"), (59.6, "1:00"), (3725, "1:02:05")])
def test_times_are_written_as_clocks_do(seconds: float, shown: str) -> None:
    assert clock(seconds) == shown


def raised(*errors: Exception) -> Exception:
    """Give the last of some exceptions, as if each had been raised while the one before was dealt with."""
    for before, error in pairwise(errors):
        error.__context__ = before
    return errors[-1]


def waited(*before: Exception) -> Exception:
    """What a wait raises, with what the backend raised as its cause."""
    stalled = StalledError("rank 1 does not come")
    stalled.__cause__ = stalled.__context__ = raised(*before, RuntimeError("Timed out waiting 1000ms"))
    return stalled


def test_what_a_rank_only_heard_of_is_told_from_what_it_did() -> None:
    heard, own = RemoteRankError, KeyError
    closed = RuntimeError("[pair.cc:547] Connection closed by peer [127.0.0.1]:5")
    assert host.order_of(own("b")) == 1
    assert host.order_of(raised(heard("rank 1 failed"), own("b"))) == 1
    assert host.order_of(waited(own("b"))) == 2
    assert host.order_of(raised(own("b"), heard("rank 1 failed"))) == 2
    for error in (heard_of(ValueError("rank 1: no")), heard("rank 1 failed"), closed, waited()):
        assert host.order_of(error) == 3


def test_a_rank_that_only_heard_of_a_failure_waits_until_all_ranks_have_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: list[float] = []
    monkeypatch.setattr(host.time, "sleep", looks.append)
    host.let_the_cause_end_first(RemoteRankError("rank 1 failed"), lambda: len(looks) == 3)
    assert len(looks) == 3
    host.let_the_cause_end_first(KeyError("b"), lambda: False)  # a cause waits for nobody
    assert len(looks) == 3


class Ended(Exception):
    """Raised where a process would have ended."""


@pytest.fixture
def ending(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(status: int) -> None:
        raise Ended(status)

    monkeypatch.setattr(os, "_exit", end)


def test_where_the_kernel_does_not_help_a_rank_looks_for_its_parent_and_ends_without_it(
    ending: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    parents = iter([5, 5, 1])
    waits: list[float] = []
    monkeypatch.setattr(os, "getppid", lambda: next(parents))
    monkeypatch.setattr(time, "sleep", waits.append)
    with pytest.raises(Ended, match="1"):
        host.watch(5)
    assert len(waits) == 2


def test_a_rank_whose_parent_is_gone_already_ends_at_once(
    ending: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = threading.Event()
    monkeypatch.setattr(host, "_ask_kernel", lambda: False)
    monkeypatch.setattr(host, "watch", lambda parent: watched.set())
    host.end_with_parent(os.getppid())
    assert watched.wait(180)
    with pytest.raises(Ended):
        host.end_with_parent(os.getppid() + 1)


def test_ranks_of_one_host_use_its_loopback_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    host.use_loopback()
    assert os.environ["GLOO_SOCKET_IFNAME"].startswith("lo")
    assert os.environ["NCCL_SOCKET_IFNAME"] == "eth7"  # named by the user, who may have a reason
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    host.use_loopback()
    assert os.environ["NCCL_SOCKET_IFNAME"].startswith("lo")


# ---------------------- the text


TOKENS = torch.arange(250, dtype=torch.uint8)  # every byte differs, so a sample tells where it was cut


def starts(samples: Samples, first: int, count: int) -> list[int]:
    inputs, targets = samples.take(first, count)
    assert inputs.shape == targets.shape == (count, samples.context)
    assert torch.equal(targets, inputs + 1)  # the byte that follows
    return inputs[:, 0].tolist()


def test_the_default_text_is_the_language_reference_and_its_last_tenth_is_held_out() -> None:
    corpus = text.load((), context=128)
    assert corpus.numel > 300_000
    assert corpus.held_out.numel() == corpus.numel // 10
    assert b"statement" in bytes(corpus.train.tolist())


def test_files_are_joined_as_bytes(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\xff" * 60)
    (tmp_path / "b").write_bytes(b"b" * 59)
    corpus = text.load([str(tmp_path / "a"), str(tmp_path / "b")], context=4)
    assert bytes(torch.cat((corpus.train, corpus.held_out)).tolist()) == b"\xff" * 60 + b"\n" + b"b" * 59
    assert corpus.name == "a, b"
    assert corpus.digest != text.load([str(tmp_path / "a")] * 2, context=4).digest


def test_a_pass_over_the_text_takes_every_window_once_and_the_next_one_another_order() -> None:
    samples = Samples(TOKENS, context=10, seed=1)
    num_windows = (250 - 1) // 10 - 1
    one, two = starts(samples, 0, num_windows), starts(samples, num_windows, num_windows)
    assert sorted(one) == list(range(min(one), 250 - 10, 10))[:num_windows]
    assert len(set(two)) == num_windows
    assert sorted(one) != one
    assert one != two


def test_the_order_does_not_depend_on_how_samples_are_asked_for() -> None:
    samples = Samples(TOKENS, context=10, seed=1)
    together = starts(samples, 3, 40)
    assert [start for first in range(3, 43, 5) for start in starts(samples, first, 5)] == together
    assert starts(Samples(TOKENS, context=10, seed=2), 3, 40) != together


def test_a_text_of_one_sample_gives_that_sample() -> None:
    assert starts(Samples(TOKENS[:11], context=10, seed=0), 0, 3) == [0, 0, 0]


@pytest.mark.parametrize("world_size", [1, 2, 3, 30])
def test_ranks_together_validate_on_every_held_out_window_once(world_size: int) -> None:
    seen = [
        start
        for rank in range(world_size)
        for inputs, _ in text.held_out_windows(TOKENS, 10, rank, world_size)
        for start in inputs[:, 0].tolist()
    ]
    assert sorted(seen) == list(range(0, 240, 10))


def test_a_long_held_out_text_is_sampled_evenly() -> None:
    tokens = torch.zeros(100_000, dtype=torch.uint8)
    counts = [len(inputs) for inputs, _ in text.held_out_windows(tokens, 10, 0, 1)]
    assert sum(counts) == text.MAX_EVAL_WINDOWS


def test_seeds_of_different_numbers_differ() -> None:
    seeds = {text.mix(seed, step, rank) for seed in range(5) for step in range(50) for rank in range(4)}
    assert len(seeds) == 1000
    assert all(0 <= seed < 2**32 for seed in seeds)


# ---------------------- the picture of an iteration, from the profiler's own events


def event(name: str, start: float, stop: float) -> dict[str, object]:
    return {"ph": "X", "name": name, "ts": 1000 * start + 7.0, "dur": 1000 * (stop - start)}


@pytest.fixture
def events(tmp_path: Path) -> Path:
    path = tmp_path / "trace.json"
    listed = [
        event("forward", 0, 4),
        event("backward", 4, 20),  # its last eight ms are spent waiting
        event("autograd::engine::evaluate_function: MmBackward0", 4, 9),
        event("autograd::engine::evaluate_function: TBackward0", 9, 12),
        event("gloo:all_reduce", 6, 10),
        event("Optimizer.step#ZeroRedundancyOptimizer.step", 9, 24),
        event("Optimizer.step#AdamW.step", 10, 14),
        event("gloo:send", 14, 15),
        event("gloo:broadcast", 14, 18),
        {"ph": "M", "name": "process_name"},
    ]
    path.write_text(json.dumps({"traceEvents": listed}))
    return path


def test_events_become_spans_and_waiting_is_no_computing(events: Path) -> None:
    assert trace.spans_of(events) == [
        Span(0, 4, "compute", "forward"),
        Span(4, 12, "compute", "backward"),
        Span(6, 10, "reduce", "gloo:all_reduce"),
        Span(10, 14, "step", "Optimizer.step#AdamW.step"),
        Span(14, 18, "gather", "gloo:broadcast"),
    ]


def test_the_hidden_share_is_what_lay_under_computing(events: Path) -> None:
    # Of 4 + 4 + 4 ms, the reduction and half of the step lay before the last gradient was computed.
    assert trace.hidden(trace.spans_of(events)) == pytest.approx(6 / 12)
    assert trace.hidden([Span(0, 1, "compute", "forward")]) == 0


def test_the_picture_is_drawn(events: Path, tmp_path: Path) -> None:
    spans = trace.spans_of(events)
    trace.draw([("one", spans), ("two", spans)], tmp_path / "both.png")
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")


def test_a_trace_without_anything_of_ours_has_no_spans(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [event("aten::add", 0, 1)]}))
    assert trace.spans_of(path) == []


# ---------------------- optimizers are found by name, and what they are given is tried before anything starts


def test_names_are_looked_up_in_torch_first() -> None:
    assert optimizers.find("Adam") is torch.optim.Adam
    assert optimizers.find("RAdam") is torch.optim.RAdam  # torch_optimizer has one too
    assert optimizers.find("Lamb").__module__.startswith("torch_optimizer")
    assert optimizers.find("torch.optim:SGD") is torch.optim.SGD


def test_a_class_of_the_users_is_found_in_the_folder_he_is_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_optimizers.py").write_text("import torch\nclass Mine(torch.optim.SGD): pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["somewhere"])
    monkeypatch.delitem(__import__("sys").modules, "my_optimizers", raising=False)
    assert optimizers.find("my_optimizers:Mine").__name__ == "Mine"


def test_without_torch_optimizer_the_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=re.escape("pip install 'zero-optim[optimizers]'")):
        optimizers.find("Lamb")


def test_options_are_python_literals_or_words() -> None:
    arguments = (
        "lr=3e-4 steps=2 betas=(0.9,0.95) list=[1,2] fused=True off=false x=none mode=adjust_lr empty="
    )
    options = {
        "lr": 3e-4,
        "steps": 2,
        "betas": (0.9, 0.95),
        "list": (1, 2),
        "fused": True,
        "off": False,
        "x": None,
        "mode": "adjust_lr",
        "empty": "",
    }
    assert optimizers.parse(arguments.split()) == options
    for argument in ("lr", "=3", "a b=3", "lr={}"):
        with pytest.raises(ValueError, match="--opt"):
            optimizers.parse([argument])


def test_only_the_default_optimizer_has_presets_and_named_options_win() -> None:
    assert dict(optimizers.with_presets("AdamW", {"lr": 1.0}))["lr"] == 1.0
    assert "betas" in dict(optimizers.with_presets("AdamW", {}))
    assert optimizers.with_presets("SGD", {"lr": 1.0}) == (("lr", 1.0),)


def test_a_class_without_a_learning_rate_is_left_to_itself() -> None:
    assert optimizers.has_rate(optimizers.check("SGD", ())[0])
    assert not optimizers.has_rate(optimizers.check("A2GradUni", ())[0])
