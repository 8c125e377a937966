"""The model, the text, the schedule, optimizers, records, what is printed, the picture of an update."""

import io
import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from rich.console import Console

from zero_optim.demo import optimizers, text, trace
from zero_optim.demo.config import ModelShape
from zero_optim.demo.display import Display, Metric, Records, Shard, clock
from zero_optim.demo.model import GPT, generate
from zero_optim.demo.prepare import METRICS
from zero_optim.demo.text import Samples
from zero_optim.demo.trace import Span
from zero_optim.demo.train import FINAL, rate_factor


def tokens(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(256, (2, count), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def gpt() -> GPT:
    torch.manual_seed(0)
    model = GPT(ModelShape(context=16, layers=2, width=16, heads=2))
    for parameter in model.parameters():  # blocks end in zeros at first: then nothing would be tested
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def test_the_model_is_made_of_matrices_and_a_position_sees_the_order_before_it_and_nothing_after(
    gpt: GPT,
) -> None:
    assert {parameter.ndim for parameter in gpt.parameters()} == {2}
    assert list(gpt.buffers()) == []
    one, other = tokens(16), tokens(16)
    other[:, 10:] = tokens(6, seed=1)
    assert torch.allclose(gpt(one)[:, :10], gpt(other)[:, :10], atol=1e-5)
    other[:, 0] += 1
    assert not torch.allclose(gpt(one)[:, 9], gpt(other % 256)[:, 9], atol=1e-3)
    swapped = one[:, [1, 0, *range(2, 8)]]
    assert not torch.allclose(gpt(one[:, :8])[:, -1], gpt(swapped)[:, -1], atol=1e-3)


def test_generated_text_goes_on_beyond_the_context_and_repeats_with_its_seed(gpt: GPT) -> None:
    prompt = torch.tensor([65], dtype=torch.uint8)
    one = generate(gpt, prompt, 20, seed=3)
    assert len(one) == 20
    assert generate(gpt, prompt, 20, seed=3) == one
    assert generate(gpt, prompt, 20, seed=4) != one
    assert generate(gpt, prompt, 0, seed=3) == b""


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant"])
def test_the_learning_rate_rises_then_follows_its_schedule(kind: str) -> None:
    factors = [rate_factor(step, kind, warmup=4, steps=20) for step in range(20)]
    assert factors[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert factors[-1] == pytest.approx(1.0 if kind == "constant" else FINAL)
    assert factors[4:] == sorted(factors[4:], reverse=True)
    assert factors[8] == pytest.approx({"cosine": 0.851, "linear": 0.76, "constant": 1.0}[kind], abs=1e-3)
    for warmup, steps in ((0, 1), (5, 3), (3, 3)):  # short runs
        assert all(0 < rate_factor(step, kind, warmup, steps) <= 1 for step in range(steps))


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
    (tmp_path / METRICS).write_text('{"step": 1}\nhello\n{"step": 2}\n')
    with pytest.raises(ValueError, match="line 2 is no record"):
        Records(tmp_path, tmp_path, through=9)
    assert Records(tmp_path, tmp_path / "nowhere", through=9).metrics == []


def shown(width: int, *shards: Shard, metrics: Sequence[Metric] = (), terminal: bool = False) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=width, highlight=False)
    display = Display(0, 100, console)
    for metric in metrics:
        display.update(metric)
    if shards:
        display.shards(shards)
        display.fact("run folder", "path/" * 30)
        display.sample("start", "add\x1b[2Jed[b]")
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_the_summary_has_a_line_for_each_rank_and_keeps_paths_whole(terminal: bool) -> None:
    page = shown(100, Shard(10, 80), Shard(30, 240), terminal=terminal)
    rows = [line.split() for line in page.splitlines() if "25.0%" in line or "75.0%" in line]
    assert rows == [["0", "10", "80", "B", "320", "B", "25.0%"], ["1", "30", "240", "B", "320", "B", "75.0%"]]
    assert "path/" * 30 in page
    assert "ed[b]" in page  # the model's text is no markup
    assert "\x1b[2J" not in page  # and moves no cursor
    assert "gradients held" not in page
    assert "a rank keeps" not in page
    page = shown(100, Shard(10, 80, 40), Shard(30, 0, 0), terminal=terminal)
    assert "gradients held" in page
    rows = [line.split() for line in page.splitlines() if "80 B" in line]
    assert [row[-2:] for row in rows] == [["40", "B"], ["0", "B"]]
    assert "a rank keeps" not in page
    if not terminal:
        page = shown(100, Shard(10, 80, 40, 40, 100), Shard(30, 240, 120, 120, 60))
        line = "parameters  a rank keeps at most 120 B of 160 B; blocks in use take at most 100 B"
        assert line in page.splitlines()


def test_plain_lines_are_few_and_show_every_validation() -> None:
    metrics = [
        Metric(step=step, train_loss=3.0, tokens_per_second=12345.6, val_loss=2.0 if step == 33 else None)
        for step in range(1, 101)
    ]
    lines = shown(100, metrics=[Metric(step=0, val_loss=5.5), *metrics]).splitlines()
    assert len(lines) == 22
    assert "update  33/100   loss 3.000   12,346 tokens/s" in lines[7]
    assert lines[7].endswith("validation 2.000")
    assert [clock(seconds) for seconds in (0.4, 59.6, 3725)] == ["0:00", "1:00", "1:02:05"]


# ---------------------- the text


TOKENS = torch.arange(250, dtype=torch.uint8)  # every byte differs, so a sample tells where it was cut


def starts(samples: Samples, first: int, count: int) -> list[int]:
    inputs, targets = samples.take(first, count)
    assert inputs.shape == targets.shape == (count, samples.context)
    assert torch.equal(targets, inputs + 1)  # the byte that follows
    return inputs[:, 0].tolist()


def test_the_text_is_files_joined_as_bytes_or_the_language_reference_and_its_last_tenth_is_held_out(
    tmp_path: Path,
) -> None:
    corpus = text.load((), context=128)
    assert corpus.numel > 300_000
    assert corpus.held_out.numel() == corpus.numel // 10
    assert b"statement" in bytes(corpus.train.tolist())
    (tmp_path / "a").write_bytes(b"\xff" * 60)
    (tmp_path / "b").write_bytes(b"b" * 59)
    corpus = text.load([str(tmp_path / "a"), str(tmp_path / "b")], context=4)
    assert bytes(torch.cat((corpus.train, corpus.held_out)).tolist()) == b"\xff" * 60 + b"\n" + b"b" * 59
    assert corpus.name == "a, b"
    assert corpus.digest != text.load([str(tmp_path / "a")] * 2, context=4).digest


def test_a_pass_takes_every_window_once_in_an_order_of_its_own_however_samples_are_asked_for() -> None:
    samples = Samples(TOKENS, context=10, seed=1)
    num_windows = (250 - 1) // 10 - 1
    one, two = starts(samples, 0, num_windows), starts(samples, num_windows, num_windows)
    assert sorted(one) == list(range(min(one), 250 - 10, 10))[:num_windows]
    assert len(set(two)) == num_windows
    assert sorted(one) != one
    assert one != two

    together = starts(samples, 3, 40)
    assert [start for first in range(3, 43, 5) for start in starts(samples, first, 5)] == together
    assert starts(Samples(TOKENS, context=10, seed=2), 3, 40) != together

    assert starts(Samples(TOKENS[:11], context=10, seed=0), 0, 3) == [0, 0, 0]


def test_ranks_together_validate_on_every_held_out_window_once_or_on_some_of_a_long_text() -> None:
    for world_size in (1, 2, 3, 30):
        windows = [
            start
            for rank in range(world_size)
            for inputs, _ in text.held_out_windows(TOKENS, 10, rank, world_size)
            for start in inputs[:, 0].tolist()
        ]
        assert sorted(windows) == list(range(0, 240, 10))
    windows = text.held_out_windows(torch.zeros(100_000, dtype=torch.uint8), 10, 0, 1)
    assert sum(len(inputs) for inputs, _ in windows) == text.MAX_EVAL_WINDOWS
    seeds = {text.mix(seed, step, rank) for seed in range(5) for step in range(50) for rank in range(4)}
    assert len(seeds) == 1000
    assert all(0 <= seed < 2**32 for seed in seeds)


# ---------------------- the picture of an iteration, from the profiler's own events


def event(name: str, start: float, stop: float) -> dict[str, object]:
    return {"ph": "X", "name": name, "ts": 1000 * start + 7.0, "dur": 1000 * (stop - start)}


def test_events_become_spans_and_a_picture_and_waiting_is_no_computing(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    events = [
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
    path.write_text(json.dumps({"traceEvents": events}))
    spans = trace.spans_of(path)
    assert spans == [
        Span(0, 4, "compute", "forward"),
        Span(4, 12, "compute", "backward"),
        Span(6, 10, "reduce", "gloo:all_reduce"),
        Span(10, 14, "step", "Optimizer.step#AdamW.step"),
        Span(14, 18, "gather", "gloo:broadcast"),
    ]
    # Of 4 + 4 + 4 ms, the reduction and half of the step lay before the last gradient was computed.
    assert trace.hidden(spans) == pytest.approx(6 / 12)
    assert trace.hidden([Span(0, 1, "compute", "forward")]) == 0
    trace.draw([("one", spans), ("two", spans)], tmp_path / "both.png")
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")
    path.write_text(json.dumps({"traceEvents": [event("aten::add", 0, 1)]}))  # nothing of ours
    assert trace.spans_of(path) == []


# ---------------------- optimizers are found by name, and what they are given is tried before anything starts


def test_names_are_looked_up_in_torch_first_and_modules_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert optimizers.find("Adam") is torch.optim.Adam
    assert optimizers.find("RAdam") is torch.optim.RAdam  # torch_optimizer has one too
    assert optimizers.find("Lamb").__module__.startswith("torch_optimizer")
    assert optimizers.find("torch.optim:SGD") is torch.optim.SGD
    (tmp_path / "my_optimizers.py").write_text("import torch\nclass Mine(torch.optim.SGD): pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["somewhere"])
    monkeypatch.delitem(__import__("sys").modules, "my_optimizers", raising=False)
    assert optimizers.find("my_optimizers:Mine").__name__ == "Mine"
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


def test_only_the_default_optimizer_has_presets_and_a_class_without_a_rate_is_left_to_itself() -> None:
    assert dict(optimizers.with_presets("AdamW", {"lr": 1.0}))["lr"] == 1.0
    assert "betas" in dict(optimizers.with_presets("AdamW", {}))
    assert optimizers.with_presets("SGD", {"lr": 1.0}) == (("lr", 1.0),)
    assert optimizers.has_rate(optimizers.check("SGD", ())[0])
    assert not optimizers.has_rate(optimizers.check("A2GradUni", ())[0])
