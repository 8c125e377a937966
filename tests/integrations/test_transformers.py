"""Hugging Face `Trainer` trains at stages 1 to 3 as with DDP: bits, accumulation, saves, resume, PEFT."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from frameworks import assert_same, fresh, sums_in_order, whole
from pool import Pool, RankError, on_ranks
from zero_optim.integrations.stages import WRAPPERS
from zero_optim.integrations.transformers import ZeroRedundancyOptimizer, ZeroTrainer

Weights = dict[str, Tensor]


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


class Zero1(ZeroTrainer, Trainer):
    zero_stage = 1


class Zero2(ZeroTrainer, Trainer):
    zero_stage = 2


class Zero2Local(ZeroTrainer, Trainer):
    zero_stage = 2
    wrap: Mapping[str, Any] = {"accumulate": "local"}


class Zero3(ZeroTrainer, Trainer):
    zero_stage = 3
    wrap: Mapping[str, Any] = {"units": [GPT2Block]}


class Zero3Local(ZeroTrainer, Trainer):
    zero_stage = 3
    wrap: Mapping[str, Any] = {"units": [GPT2Block], "accumulate": "local"}


class OneSaves(Trainer):
    """Calls `_save` as transformers 5.16 and axolotl do."""

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if self.args.should_save:
            self._save(output_dir)


class Zero3SavedByOne(ZeroTrainer, OneSaves):
    zero_stage = 3
    wrap: Mapping[str, Any] = {"units": [GPT2Block]}


ADAMW = {"lr": 0.01, "eps": 1e-3}  # for gradients that are zero but for their rounding
SHARDED = (ZeroRedundancyOptimizer, {"optimizer_class": torch.optim.AdamW, **ADAMW})
PLAIN = (torch.optim.AdamW, ADAMW)
KINDS: dict[str, tuple[type[Any], Any]] = {
    "ddp": (Trainer, PLAIN),
    "ddp in order": (InOrder, PLAIN),
    "stage 1 by its optimizer": (Trainer, SHARDED),
    "stage 1": (Zero1, PLAIN),
    "stage 2": (Zero2, PLAIN),
    "stage 3": (Zero3, SHARDED),
    "stage 2 local": (Zero2Local, PLAIN),
    "stage 3 local": (Zero3Local, PLAIN),
    "stage 3 saved by one": (Zero3SavedByOne, PLAIN),
}
REFERENCES = {kind: "ddp" if "1" in kind else "ddp in order" for kind in KINDS}
ZERO = [kind for kind in KINDS if kind[-1].isdigit() or kind.endswith("optimizer")]


@dataclass
class Run:
    """A training run of two epochs of at most six steps."""

    kind: str
    folder: Path
    resumes: str | None = None
    lora: bool = False
    in_order: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def trainer(self, **more: Any) -> Any:
        kind, chosen = KINDS[self.kind]
        options = {"save_strategy": "no", "max_grad_norm": 0.3, "num_train_epochs": 2, **self.options}
        args = TrainingArguments(
            output_dir=str(self.folder),
            use_cpu=True,
            ddp_backend="gloo",
            per_device_train_batch_size=2,
            report_to=[],
            disable_tqdm=True,
            logging_steps=100,
            weight_decay=0.1,
            **options,
        )
        return kind(gpt2(self.lora), args, train_dataset=Tokens(), optimizer_cls_and_kwargs=chosen, **more)

    def weights(self, **more: Any) -> Weights:
        with fresh(), sums_in_order(self.in_order):
            trainer = self.trainer(**more)
            trainer.train(resume_from_checkpoint=self.resumes)
            stage = getattr(trainer, "zero_stage", 1)
            assert stage == 1 or isinstance(trainer.model_wrapped, WRAPPERS[stage])
            return whole(trainer.model)


OPTIONS: dict[str, Mapping[str, Any]] = {
    "clipped": {},
    "not clipped": {"max_grad_norm": 0.0},
    "bf16": {"bf16": True},
    "checkpointing": {"gradient_checkpointing": True},
}


@on_ranks(2)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("kind", ZERO)
def test_each_stage_trains_with_the_bits_of_ddp(tmp_path: Path, kind: str, option: str) -> None:
    expected = Run(REFERENCES[kind], tmp_path, options=OPTIONS[option]).weights()
    assert_same(Run(kind, tmp_path, options=OPTIONS[option]).weights(), expected)


@on_ranks(2)
@pytest.mark.parametrize("kind", ["stage 1", "stage 2", "stage 3", "stage 2 local", "stage 3 local"])
def test_passes_accumulate(tmp_path: Path, kind: str) -> None:
    options = {"gradient_accumulation_steps": 2}
    expected = Run(REFERENCES[kind], tmp_path, options=options).weights()
    is_equal = kind in ("stage 1", "stage 2 local", "stage 3 local")
    assert_same(Run(kind, tmp_path, options=options).weights(), expected, to_the_bit=is_equal)


@on_ranks(2)
@pytest.mark.parametrize("kind", ZERO)
def test_adapters_of_peft_train(tmp_path: Path, kind: str) -> None:
    expected = Run(REFERENCES[kind], tmp_path / "ddp", lora=True).weights()
    assert_same(Run(kind, tmp_path / "zero", lora=True).weights(), expected)


def trained_twice(run: Run) -> Weights:
    with fresh():
        trainer = run.trainer(eval_dataset=Tokens())
        trainer.train()
        trainer.evaluate()
        trainer.train()
        trainer.save_model()
        return whole(trainer.model)


@on_ranks(2)
@pytest.mark.parametrize("kind", [*ZERO, "stage 3 saved by one"])
def test_a_trainer_may_train_again_and_save_its_model(tmp_path: Path, kind: str) -> None:
    expected = trained_twice(Run(REFERENCES[kind], tmp_path / "ddp"))
    got = trained_twice(Run(kind, tmp_path / "zero"))
    assert_same(got, expected)
    dist.barrier()  # rank 0 writes
    saved = GPT2LMHeadModel.from_pretrained(tmp_path / "zero").state_dict()
    assert_same({name: saved[name] for name in got}, expected)


# ---------------------------------------------------------------------- checkpoints


def run_weights(run: Run) -> Weights:
    return run.weights()


SAVES = {"save_strategy": "epoch"}


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("lora", [False, True], ids=["whole", "lora"])
@pytest.mark.parametrize("kind", ZERO)
def test_checkpoints_resume_on_any_number_of_ranks(
    pool: Pool, tmp_path: Path, kind: str, lora: bool, size: int
) -> None:
    """Saved at the end of the first epoch, step 6."""
    results, states = [], []
    for each in (REFERENCES[kind], kind):
        folder = tmp_path / each.replace(" ", "-")
        pool.run(2, run_weights, Run(each, folder, lora=lora, options=SAVES))
        path = folder / "checkpoint-6"
        states.append(torch.load(path / "optimizer.pt"))
        options = {"ignore_data_skip": True, "max_steps": 12}
        in_order = each == "ddp in order" and size > 2
        again = Run(each, folder / "again", str(path), lora, in_order, options)
        results.append(pool.run(size, run_weights, again)[0])
    assert_same(results[1], results[0])
    before, after = (state["state"] for state in states)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[i]["exp_avg"], before[i]["exp_avg"]) for i in before)


@pytest.mark.parametrize(
    ("before", "after"),
    [("ddp in order", "stage 3"), ("stage 2", "ddp in order"), ("stage 3", "ddp in order")],
)
def test_checkpoints_go_from_stage_to_stage_and_to_ddp(
    pool: Pool, tmp_path: Path, before: str, after: str
) -> None:
    expected = pool.run(2, run_weights, Run("ddp in order", tmp_path / "ddp"))[0]
    pool.run(2, run_weights, Run(before, tmp_path / "x", options=SAVES))
    resumed = Run(after, tmp_path / "y", str(tmp_path / "x" / "checkpoint-6"))
    assert_same(pool.run(2, run_weights, resumed)[0], expected)


def best_of(run: Run) -> tuple[Weights, list[str]]:
    weights = run.weights(eval_dataset=Tokens())
    return weights, sorted(path.name for path in run.folder.glob("checkpoint-*"))


@pytest.mark.parametrize("kind", ZERO)
def test_the_best_model_is_saved_and_loaded_at_the_end(pool: Pool, tmp_path: Path, kind: str) -> None:
    options = {
        "save_strategy": "best",
        "eval_strategy": "steps",
        "eval_steps": 3,
        "metric_for_best_model": "loss",
        "greater_is_better": True,  # so that a later one is loaded over
        "load_best_model_at_end": True,
    }
    (expected, folders), (got, saved) = (
        pool.run(2, best_of, Run(each, tmp_path / each.replace(" ", "-"), options=options))[0]
        for each in (REFERENCES[kind], kind)
    )
    assert saved == folders
    assert folders
    assert_same(got, expected)


# ---------------------------------------------------------------------- refusals


class SavesLater(TrainerCallback):
    """Asks for a save after the callback that consolidates was called."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_save = state.global_step == 1


@on_ranks(2)
def test_a_save_that_comes_as_a_surprise_works_with_the_mixin(tmp_path: Path) -> None:
    Run("stage 1", tmp_path, options={"max_steps": 2}).weights(callbacks=[SavesLater()])
    assert (tmp_path / "checkpoint-1" / "optimizer.pt").exists()


def saves_later(run: Run) -> None:
    run.weights(callbacks=[SavesLater()])


def test_a_save_that_comes_as_a_surprise_raises_without_the_mixin(pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(RankError, match="NotConsolidatedError: rank 0 holds only its own part of the state"):
        pool.run(2, saves_later, Run("stage 1 by its optimizer", tmp_path, options={"max_steps": 2}))
    assert not list(tmp_path.rglob("optimizer.pt"))


class Zero4(ZeroTrainer, Trainer):
    zero_stage = 4


@on_ranks(1)
def test_what_cannot_be_meant_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected a stage of ZeRO, 1, 2 or 3, got 4"):
        Zero4(nn.Linear(2, 2))
    with fresh():
        args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
        model = gpt2()
        optimizers: Any = (torch.optim.SGD(model.parameters()), None)
        trainer: Any = Zero2(model, args, train_dataset=Tokens(), optimizers=optimizers)
        with pytest.raises(TypeError, match=r"expected a zero_optim\.ZeroRedundancyOptimizer, got SGD"):
            trainer.train()


class Factory:
    """Builds an optimizer of a whole model, as Trainer does for some."""

    def __call__(self, model: nn.Module, **options: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), **options)


@on_ranks(1)
def test_a_factory_of_trainer_is_refused(tmp_path: Path) -> None:
    with fresh():
        args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
        chosen: Any = (Factory, {"lr": 0.1})
        trainer: Any = Zero2(gpt2(), args, train_dataset=Tokens(), optimizer_cls_and_kwargs=chosen)
        with pytest.raises(TypeError, match="factory"):
            trainer.train()
