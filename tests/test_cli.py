"""The command line: bad input gets one line and status 2, and no process is started for it."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from zero_optim import ZeroRedundancyOptimizer, checkpoint, cli
from zero_optim.demo import prepare
from zero_optim.demo.config import RunConfig, flag
from zero_optim.demo.model import GPT

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


class Started(Exception):
    """Raised in the place of starting ranks, with the run that would have been."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__()
        self.config = config


@pytest.fixture(autouse=True)
def nothing_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(config: RunConfig) -> None:
        raise Started(config)

    monkeypatch.setattr(cli, "launch", lambda train, nproc, config, **options: start(config))
    monkeypatch.setattr("zero_optim.demo.train.train_under_torchrun", lambda config, place: start(config))
    monkeypatch.chdir(tmp_path)
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)


def started(*arguments: str) -> RunConfig:
    with pytest.raises(Started) as caught:
        cli.main(["train", *arguments])
    return caught.value.config


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that must be refused; gives its line."""
    try:
        status = cli.main(["train", *arguments])
    except SystemExit as ended:  # argparse's way
        status = ended.code  # type: ignore[assignment]
    assert status == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("zero-optim: ")
    assert err.count("\n") == 1
    assert not Path("runs").exists()
    return err


def save(folder: str, step: int = 5, **changes: object) -> None:
    """Leave a checkpoint that a run could have left, saved in a group of one that lives for it."""
    options = (("lr", 0.5), ("momentum", 0.9))
    fields = {"width": 16, "heads": 2, "layers": 1, "context": 16, "optimizer": "SGD", "options": options}
    config = RunConfig(out=folder, **{**fields, **changes})
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = GPT(config.shape)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD)
        extra = prepare.extra(config, step, "")
        saved = prepare.checkpoint_folder(config.out, step)
        checkpoint.save(saved, model=model, optimizer=optimizer, extra=extra)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--text", "nowhere"], "no such file: "),
        (["--context", "100000"], "--context 100000 needs"),
        (["--optimizer", "Adamm"], "unknown optimizer Adamm; did you mean Adam"),
        (["--text", "."], "not a regular file"),
        (["--optimizer", "adamw"], "unknown optimizer adamw; did you mean AdamW"),
        (["--optimizer", "Nothing"], "give a class of torch.optim or torch_optimizer"),
        (["--optimizer", "nowhere:Mine"], "cannot import nowhere:Mine: ModuleNotFoundError"),
        (["--optimizer", "torch.optim:Nothing"], "cannot import torch.optim:Nothing: AttributeError"),
        (["--optimizer", "json:loads"], "json:loads is not a class derived from torch.optim.Optimizer"),
        (["--opt", "lr"], "--opt takes KEY=VALUE"),
        (["--opt", "lrr=1"], "AdamW has no option lrr; did you mean lr?; it takes lr, betas"),
        (["--opt", "params=1"], "no option params"),
        (["--opt", "lr=-1"], "Invalid learning rate"),
        (["--optimizer", "SGD", "--opt", "lr=quick"], "TypeError"),
        (["--optimizer", "LBFGS"], "LBFGS failed on a small trial"),
        (["--optimizer", "LBFGS"], "closure"),
        (["--optimizer", "SparseAdam"], "dense gradients"),
        (
            ["--optimizer", "A2GradUni", "--warmup", "3"],
            "no fixed learning rate to schedule: leave out --war",
        ),
        (["--nproc", "0"], "--nproc must be at least 1, got 0"),
        (["--nproc", "two"], "invalid int value: 'two'"),
        (["--nproc", "3"], "--batch-size 16 cannot be shared equally by 3 ranks: give a multiple of 3"),
        (["--accumulate", "3"], "2 ranks x 3 accumulated micro-batches: give a multiple of 6"),
        (["--warmup", "-1"], "--warmup must be at least 0"),
        (
            ["--seed", str(2**64)],
            "--seed must be below 2**64, as PyTorch's seeds are, got 1844674407370955161",
        ),
        (["--out", ""], "--out must be the name of a folder, got ''"),
        (["--heads", "128"], "even number"),
        (["--heads", "5"], "--width 128 is not divisible by --heads 5"),
        (["--clip", "nan"], "--clip"),
        (["--frobnicate"], "unrecognized arguments: --frobnicate"),
        (["--lr-schedule", "cubic"], "invalid choice: 'cubic'"),
        (["--overlap", "--clip", "1"], "nothing can be clipped: give --clip 0"),
        (["--overlap", "owners", "--hook", "fp16"], "leave out --hook fp16"),
        (["--overlap", "--optimizer", "MADGRAD"], "--overlap: MADGRAD cannot be stepped in parts"),
        (["--shard", "state,gradients"], "invalid choice: 'state,gradients'"),
        (["--shard", "gradients", "--ddp", "torch"], "give --ddp ours"),
        (["--shard", "gradients", "--hook", "fp16"], "leave out --hook fp16"),
        (["--shard", "gradients", "--overlap"], "--overlap during it: give --overlap off or --shard state"),
        (["--shard", "gradients", "--overlap", "owners", "--clip", "1"], "but cannot clip"),
        (["--shard", "parameters", "--ddp", "torch"], "--shard parameters needs zero_optim's"),
        (["--shard", "parameters", "--hook", "fp16"], "leave out --hook fp16"),
        (["--resume"], "give a run folder"),
        (["--resume", "nowhere"], "no checkpoint at nowhere"),
    ],
    ids=" ".join,
)
def test_bad_input_gets_one_line_and_status_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], line: str
) -> None:
    assert line in refused(capsys, *arguments)


def test_a_config_reads_back_from_its_json_and_checks_itself() -> None:
    text, options = ("a", "b"), (("betas", (0.5, 0.9)), ("fused", True), ("lr", 1e-3))
    config = RunConfig(out="there", text=text, options=options, clip=0.0)
    assert RunConfig.from_json(config.to_json()) == config
    for field in ("schedule", "device"):
        with pytest.raises(ValueError, match=f"{flag(field)} must be one of"):
            RunConfig(**{"out": "there", field: "cubic"})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there may be GPUs enough")
def test_gpus_that_are_not_there_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "needs a GPU for each of 2 ranks" in refused(capsys, "--device", "cuda")


@pytest.mark.parametrize("name", ["rich", "matplotlib"])
def test_a_missing_extra_is_named_with_the_command_that_installs_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    find = prepare.importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda asked: None if asked == name else find(asked))
    assert f"{name} not installed: pip install 'zero-optim[demo]'" in refused(capsys)


def test_every_field_has_an_option_that_reaches_it() -> None:
    values = {
        **{each.name: 2 * each.default for each in fields(RunConfig) if each.metadata.get("type") is int},
        "seed": 4,
        "clip": 0.5,
        "optimizer": "SGD",
        "schedule": "linear",
        "device": "cpu",
        "out": "there",
        "ddp": "torch",
        "hook": "fp16",
    }
    arguments = [part for name, value in values.items() for part in (flag(name), str(value))]
    flags = ("--bf16", "--trace", "--text", __file__)
    config = started(*arguments, "--opt", "lr=2", "--opt", "nesterov=false", *flags)
    assert {name: getattr(config, name) for name in values} == values
    assert config.options == (("lr", 2), ("nesterov", False))
    assert (config.bf16, config.trace, config.text) == (True, True, (str(Path(__file__).resolve()),))
    overlapped = started("--overlap")
    assert (overlapped.overlap, overlapped.clip) == ("everywhere", 0.0)
    assert started("--overlap", "owners").overlap == "owners"
    sharded = started("--shard", "gradients")
    assert (sharded.shard, sharded.clip) == ("gradients", RunConfig(out="any").clip)
    assert started("--shard", "parameters").shard == "parameters"
    others = {"options", "bf16", "trace", "overlap", "shard", "text", "resume"}
    assert {*values, *others} == {field.name for field in fields(config)}


def test_a_run_is_named_after_its_optimizer_and_its_folder_is_there_before_it_starts() -> None:
    one, two = started("--optimizer", "RAdam"), started("--optimizer", "torch.optim:RAdam")
    assert one.out.startswith("runs/radam-")
    assert Path(one.out).is_dir()
    assert one.out != two.out


def test_a_resumed_run_keeps_its_options_but_for_those_named() -> None:
    save("there", steps=9, seed=3, nproc=4, accumulate=2)
    config = started("--resume", "there", "--seed", "8")
    assert (config.steps, config.seed, config.nproc, config.accumulate) == (9, 8, 4, 2)
    assert (config.out, config.resume) == ("there", "there/checkpoints/00000005")
    assert config.options == (("lr", 0.5), ("momentum", 0.9))
    assert started("--resume", config.resume, "--optimizer", "SGD", "--out", "new").out == "new"


def test_a_folder_or_checkpoint_of_another_run_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save("there")
    Path("file").touch()
    for arguments, line in (
        ("--out there", "there holds a run: resume it with --resume there"),
        ("--out file", "cannot make the run folder file"),
        ("--resume there --width 32", "another run: it has --width 16, this run has --width 32"),
        ("--resume there --optimizer Adam", "another run: it has --optimizer SGD, this run has --optimizer"),
        (
            "--resume there --opt lr=1",
            "it has --opt lr=0.5 momentum=0.9, this run has --opt lr=1 momentum=0.9",
        ),
        ("--resume there --steps 5", "the run has already made 5 updates"),
    ):
        assert line in refused(capsys, *arguments.split())
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "GPT", lambda shape: GPT(replace(shape, layers=2)))
        assert "has other tensors" in refused(capsys, "--resume", "there")
    data = next(Path("there", "checkpoints", "00000005").glob("data-*"))
    data.write_bytes(data.read_bytes()[:1000])
    assert "no checkpoint at there is complete" in refused(capsys, "--resume", "there")


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module in the current folder; gives the file that it makes when it is imported."""
    code = "import pathlib, torch\npathlib.Path(__file__).with_name('trace').touch()\n"
    Path("planted.py").write_text(code + "class Mine(torch.optim.SGD): pass\n")
    monkeypatch.setattr("sys.path", ["", *sys.path])
    yield Path("trace").resolve()
    sys.modules.pop("planted", None)


def test_a_checkpoint_chooses_neither_what_is_imported_nor_the_words_of_a_proposed_command(
    capsys: pytest.CaptureFixture[str], planted: Path
) -> None:
    save("bad", optimizer="planted:Mine; rm -r there\n\x1b[2J")
    line = refused(capsys, "--resume", "bad")
    assert "names no optimizer class" in line
    assert line[:-1].isprintable()
    save("there", optimizer="planted:Mine")
    line = refused(capsys, "--resume", "there")
    assert "names the optimizer class planted:Mine" in line
    assert "give --optimizer planted:Mine" in line
    line = refused(capsys, "--resume", "there", "--optimizer", "SGD")
    assert "it has --optimizer planted:Mine, this run has --optimizer SGD" in line
    assert not planted.exists()
    config = started("--resume", "there", "--optimizer", "planted:Mine")
    assert config.options == (("lr", 0.5), ("momentum", 0.9))
    assert planted.exists()  # the user has asked for it


def test_a_run_that_was_ended_says_which_class_of_the_users_to_name_again(
    capsys: pytest.CaptureFixture[str], planted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(train: object, nproc: int, config: RunConfig, **options: object) -> None:
        save(config.out, optimizer=config.optimizer)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(cli, "launch", interrupted)
    assert cli.main(["train", "--optimizer", "planted:Mine", "--out", "there"]) == 128 + signal.SIGTERM
    command = "zero-optim train --resume there --optimizer planted:Mine"
    assert capsys.readouterr().err.endswith(f"resume with: {command}\n")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="this Python always looks in the current folder")
def test_new_processes_of_the_launcher_import_nothing_from_the_current_folder(planted: Path) -> None:
    with cli._as_launcher():
        command = [sys.executable, "-c", "import planted"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert "ModuleNotFoundError" in done.stderr
    assert not planted.exists()


def under_torchrun(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    for name, value in zip(LAUNCHER, (rank, 8, rank % 4, 4), strict=True):
        monkeypatch.setenv(name, str(value))


def test_under_torchrun_it_is_one_of_the_ranks_and_one_rank_a_host_tells_of_bad_input(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    under_torchrun(monkeypatch, rank=5)
    assert started("--nproc", "4").nproc == 4
    assert not Path("runs").exists()  # rank 0 makes it
    under_torchrun(monkeypatch, rank=4)
    assert "torchrun started 4 ranks on this host" in refused(capsys, "--nproc", "2")
    assert "--batch-size 12 cannot be shared equally by 8 ranks" in refused(capsys, "--batch-size", "12")
    under_torchrun(monkeypatch, rank=1)
    assert cli.main(["train", "--batch-size", "12"]) == 2
    assert capsys.readouterr() == ("", "")
