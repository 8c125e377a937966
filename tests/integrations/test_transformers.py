"""Hugging Face `Trainer` trains at stages 1 to 3 as with DDP: bits, accumulation, saves, resume, PEFT."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

import frameworks
from frameworks import (
    Weights,
    assert_as_ddp,
    assert_resumes,
    assert_same,
    averages_in,
    fresh,
    sums_in_order,
    whole,
)
from pool import Pool, on_ranks
from zero_optim.integrations.stages import WRAPPERS
from zero_optim.integrations.transformers import ZeroRedundancyOptimizer, ZeroTrainer


class Tokens(Dataset[Any]):
    """Sentences of random tokens."""

    def __init__(self) -> None:
        self.tokens = torch.randint(0, 64, (24, 16), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Any:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def gpt2(lora: bool = False) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
    config = GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    model = GPT2LMHeadModel(config)  # its head is tied to the embedding
    if lora:
        torch.manual_seed(0)
        options = {"target_modules": ["c_attn"], "modules_to_save": ["ln_f"], "r": 4, "fan_in_fan_out": True}
        return peft.get_peft_model(model, peft.LoraConfig(**options))
    return model


class InOrder(Trainer):
    """Adds up the norms of gradients in the order of the optimizer's groups, which is not the model's."""

    def _clip_grad_norm(self, model: Any) -> Any:
        params = [param for group in self.optimizer.param_groups for param in group["params"]]
        return nn.utils.clip_grad_norm_(params, self.args.max_grad_norm)


class OneSaves(Trainer):
    """Calls `_save` as transformers 5.16 and axolotl do."""

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if self.args.should_save:
            self._save(output_dir)


def of_stage(stage: int, base: type[Any] = Trainer, **wrap: Any) -> type[Any]:
    """A trainer as users write it, with options of its wrapper."""
    units = {"units": [GPT2Block]} if stage == 3 else {}
    return type(f"Zero{stage}", (ZeroTrainer, base), {"zero_stage": stage, "wrap": {**units, **wrap}})


ADAMW = {"lr": 0.01, "eps": 1e-3}  # for gradients that are zero but for their rounding
SHARDED = (ZeroRedundancyOptimizer, {"optimizer_class": torch.optim.AdamW, **ADAMW})
PLAIN = (torch.optim.AdamW, ADAMW)
KINDS: dict[str, tuple[type[Any], Any]] = {
    "ddp": (Trainer, PLAIN),
    "ddp in order": (InOrder, PLAIN),
    "stage 1 by its optimizer": (Trainer, SHARDED),
    "stage 1": (of_stage(1), PLAIN),
    "stage 2": (of_stage(2), PLAIN),
    "stage 3": (of_stage(3), SHARDED),
    "stage 2 local": (of_stage(2, accumulate="local"), PLAIN),
    "stage 3 local": (of_stage(3, accumulate="local"), PLAIN),
    "stage 3 saved by one": (of_stage(3, OneSaves), PLAIN),
}
REFERENCES = {kind: "ddp" if "1" in kind else "ddp in order" for kind in KINDS}
ZERO = [kind for kind in KINDS if kind[-1].isdigit() or kind.endswith("optimizer")]


@dataclass
class Run(frameworks.Run):
    """A training run of two epochs of at most six steps; ``saves`` and ``resumes`` are output folders."""

    kind: str = ""
    lora: bool = False

    def of_ddp(self, in_order: bool = False) -> "Run":
        return replace(self, kind=REFERENCES[self.kind], in_order=in_order)

    def trainer(self, folder: Path, **more: Any) -> Any:
        kind, chosen = KINDS[self.kind]
        options = {"save_strategy": "no", "max_grad_norm": 0.3, "num_train_epochs": 2}
        if self.resumes:
            options |= {"ignore_data_skip": True, "max_steps": 12}
        elif self.saves:
            options["save_strategy"] = "epoch"
        args = TrainingArguments(
            output_dir=str(self.saves or folder),
            use_cpu=True,
            ddp_backend="gloo",
            per_device_train_batch_size=2,
            report_to=[],
            disable_tqdm=True,
            logging_steps=100,
            weight_decay=0.1,
            **{**options, **self.options()},
        )
        return kind(gpt2(self.lora), args, train_dataset=Tokens(), optimizer_cls_and_kwargs=chosen, **more)

    def weights(self, **more: Any) -> Weights:
        with fresh(), sums_in_order(self.in_order), TemporaryDirectory() as folder:
            trainer = self.trainer(Path(folder), **more)
            trainer.train(resume_from_checkpoint=self.resumes and str(self.resumes / "checkpoint-6"))
            stage = getattr(trainer, "zero_stage", 1)
            assert stage == 1 or isinstance(trainer.model_wrapped, WRAPPERS[stage])
            return whole(trainer.model)

    def saved(self, path: Path) -> Weights:
        return averages_in(torch.load(path / "checkpoint-6" / "optimizer.pt"))


def of_kind(kind: str, **options: Any) -> Run:
    return Run(int(next(filter(str.isdigit, kind), "0")), kind=kind, **options)


OPTIONS: dict[str, Mapping[str, Any]] = {
    "clipped": {},
    "not clipped": {"max_grad_norm": 0.0},
    "bf16": {"bf16": True},
    "checkpointing": {"gradient_checkpointing": True},
}


@on_ranks(2)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("kind", ZERO)
def test_each_stage_trains_with_the_bits_of_ddp(kind: str, option: str) -> None:
    assert_as_ddp(of_kind(kind, options=partial(dict, OPTIONS[option])))


@on_ranks(2)
@pytest.mark.parametrize("kind", ["stage 1", "stage 2", "stage 3", "stage 2 local", "stage 3 local"])
def test_passes_accumulate(kind: str) -> None:
    is_equal = kind in ("stage 1", "stage 2 local", "stage 3 local")
    options = partial(dict, gradient_accumulation_steps=2)
    assert_as_ddp(of_kind(kind, options=options), to_the_bit=is_equal)


@on_ranks(2)
@pytest.mark.parametrize("kind", ZERO)
def test_adapters_of_peft_train(kind: str) -> None:
    assert_as_ddp(of_kind(kind, lora=True))


def trained_twice(run: Run, folder: Path) -> Weights:
    with fresh():
        trainer = run.trainer(folder, eval_dataset=Tokens())
        trainer.train()
        trainer.evaluate()
        trainer.train()
        trainer.save_model()
        return whole(trainer.model)


@on_ranks(2)
@pytest.mark.parametrize("kind", [*ZERO, "stage 3 saved by one"])
def test_a_trainer_may_train_again_and_save_its_model(tmp_path: Path, kind: str) -> None:
    expected = trained_twice(of_kind(REFERENCES[kind]), tmp_path / "ddp")
    got = trained_twice(of_kind(kind), tmp_path / "zero")
    assert_same(got, expected)
    dist.barrier()  # rank 0 writes
    saved = GPT2LMHeadModel.from_pretrained(tmp_path / "zero").state_dict()
    assert_same({name: saved[name] for name in got}, expected)


# ---------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("lora", [False, True], ids=["whole", "lora"])
@pytest.mark.parametrize("kind", ZERO)
def test_checkpoints_resume_on_any_number_of_ranks(
    pool: Pool, tmp_path: Path, kind: str, lora: bool, size: int
) -> None:
    assert_resumes(pool, tmp_path, of_kind(kind, lora=lora), size)


@pytest.mark.parametrize(
    ("before", "after"),
    [("ddp in order", "stage 3"), ("stage 2", "ddp in order"), ("stage 3", "ddp in order")],
)
def test_checkpoints_go_from_stage_to_stage_and_to_ddp(
    pool: Pool, tmp_path: Path, before: str, after: str
) -> None:
    assert_resumes(pool, tmp_path, of_kind(before), then=of_kind(after))


# ---------------------------------------------------------------------- refusals


class Factory:
    """Builds an optimizer of a whole model, as Trainer does for some."""

    def __call__(self, model: nn.Module, **options: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), **options)


@on_ranks(1)
def test_what_cannot_be_meant_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected a stage of ZeRO, 1, 2 or 3, got 4"):
        of_stage(4)(nn.Linear(2, 2))
    model = gpt2()
    plain = {"optimizers": (torch.optim.SGD(model.parameters()), None)}
    for options, message in (
        (plain, r"expected a zero_optim\.ZeroRedundancyOptimizer, got SGD"),
        ({"optimizer_cls_and_kwargs": (Factory, {"lr": 0.1})}, "factory"),
    ):
        with fresh():
            args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
            trainer = of_stage(2)(model, args, train_dataset=Tokens(), **options)
            with pytest.raises(TypeError, match=message):
                trainer.train()
