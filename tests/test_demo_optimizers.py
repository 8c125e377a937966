"""Optimizers are found by name, and what they are given is tried before anything starts."""

import re
from pathlib import Path

import pytest
import torch

from zero_optim.demo import optimizers


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


def test_a_name_that_leads_to_no_optimizer_is_refused() -> None:
    lines = {
        "adamw": "unknown optimizer adamw; did you mean AdamW",
        "Nothing": "give a class of torch.optim or torch_optimizer",
        "nowhere:Mine": "cannot import nowhere:Mine: ModuleNotFoundError",
        "torch.optim:Nothing": "cannot import torch.optim:Nothing: AttributeError",
        "json:loads": "json:loads is not a class derived from torch.optim.Optimizer",
    }
    for name, line in lines.items():
        with pytest.raises(ValueError, match=line):
            optimizers.find(name)


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


def test_a_class_that_cannot_train_with_its_options_is_refused() -> None:
    cases: list[tuple[str, optimizers.Options, str]] = [
        ("AdamW", (("lrr", 1.0),), "AdamW has no option lrr; did you mean lr?; it takes lr, betas"),
        ("AdamW", (("params", 1),), "no option params"),
        ("AdamW", (("lr", -1),), "Invalid learning rate"),
        ("SGD", (("lr", "quick"),), "TypeError"),
        ("LBFGS", (), "closure"),
        ("SparseAdam", (), "dense gradients"),
    ]
    for name, options, line in cases:
        with pytest.raises(ValueError, match=re.escape(line)) as caught:
            optimizers.check(name, options)
        assert "\n" not in str(caught.value)


def test_a_class_without_a_learning_rate_is_left_to_itself() -> None:
    assert optimizers.has_rate(optimizers.check("SGD", ()))
    assert not optimizers.has_rate(optimizers.check("A2GradUni", ()))
