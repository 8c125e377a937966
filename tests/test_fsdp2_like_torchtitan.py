"""A loop as torchtitan has it: from meta, recomputed, compiled, accumulated, clipped, saved flat, resumed."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fsdp2 import MUON, assert_equal, take_gradients
from pool import Ranks
from training import needs_muon
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.dtensor.placement import is_dtensor, local_rows, spans

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
LR_OF_MUON, LR = 0.02, 0.01


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.inward, self.outward = nn.Linear(width, 2 * width, False), nn.Linear(2 * width, width, False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outward(torch.nn.functional.silu(self.inward(self.norm(x))))


class Llama(nn.Module):
    def __init__(self, width: int = 12, words: int = 23) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.layers = nn.ModuleDict({str(number): Layer(width) for number in range(2)})
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, words, False)

    def init_weights(self) -> None:
        generator = torch.Generator().manual_seed(0)
        for param in self.parameters():
            drawn = torch.randn(param.shape, generator=generator) * 0.1
            start, stop = spans(len(drawn), dist.get_world_size())[dist.get_rank()]
            local_rows(param).copy_(drawn[start:stop] if is_dtensor(param) else drawn)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers.values():
            x = layer(x)
        return self.head(self.norm(x))


def divided(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """Give the matrices of the layers, and the rest."""
    of_layers = [param for name, param in model.named_parameters() if "layers" in name and param.ndim == 2]
    return of_layers, [param for param in model.parameters() if all(param is not each for each in of_layers)]


class Optimizers(Stateful):
    """torchtitan's container, around one optimizer of ours."""

    def __init__(self, model: nn.Module) -> None:
        matrices, the_rest = divided(model)
        of_muon = {"params": matrices, "optimizer_class": MUON, "lr": LR_OF_MUON, "cost": "matmul"}
        self.model = model
        self.inner = ZeroRedundancyOptimizer([of_muon, {"params": the_rest}], torch.optim.AdamW, lr=LR)

    def state_dict(self) -> dict[str, Any]:
        return get_optimizer_state_dict(self.model, self.inner, options=FLAT)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_optimizer_state_dict(self.model, self.inner, optim_state_dict=state_dict, options=FLAT)


class Model(Stateful):
    """torchtitan's wrapper of the model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        return get_model_state_dict(self.model)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_model_state_dict(self.model, state_dict, options=StateDictOptions(strict=False))


def sharded() -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with torch.device("meta"):
        model = Llama()
    for name, layer in model.layers.named_children():
        wrapped = checkpoint_wrapper(layer)
        model.layers.register_module(name, wrapped)
        wrapped.compile(backend="aot_eager")
        fully_shard(wrapped, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device="cpu")
    model.init_weights()
    return model


def train(folder: Path, steps: range, twin: dict[str, Any] | None) -> dict[str, Any]:
    """Train beside an unsharded twin; return its states."""
    model, plain_model = sharded(), Llama()
    plain_model.init_weights()
    optimizers, (matrices, the_rest) = Optimizers(model), divided(plain_model)
    plain = [MUON(matrices, lr=LR_OF_MUON), torch.optim.AdamW(the_rest, lr=LR)]
    schedulers = [
        torch.optim.lr_scheduler.LambdaLR(each, lambda step: 1.0 / (1 + step))
        for each in (optimizers.inner, *plain)
    ]
    states = {"model": Model(model), "optimizer": optimizers, "lr_scheduler": schedulers[0]}
    if twin is not None:
        dcp.load(states, checkpoint_id=folder)
        for one, state in zip((plain_model, *plain, *schedulers[1:]), twin["states"], strict=True):
            one.load_state_dict(state)
        assert_equal(model, plain_model, "when loaded")
    for step in steps:
        optimizers.inner.zero_grad()
        for part in range(2):
            model.set_requires_gradient_sync(part == 1)
            generator = torch.Generator().manual_seed(100 * step + 10 * part + dist.get_rank())
            tokens = torch.randint(0, 23, (2, 7), generator=generator)
            scores = model(tokens[:, :-1]).flatten(0, 1).float()
            (nn.functional.cross_entropy(scores, tokens[:, 1:].flatten()) / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        take_gradients(plain_model, model)
        for each in (optimizers.inner, *plain, *schedulers):
            each.step()
        assert_equal(model, plain_model, f"after step {step}")
    dcp.save(states, checkpoint_id=folder)
    return {"states": [each.state_dict() for each in (plain_model, *plain, *schedulers[1:])]}


@needs_muon
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of DCP, of the wrapper of layers, and of the compiler
def test_a_loop_trains_and_resumes_on_more_ranks(ranks2: Ranks, ranks3: Ranks, tmp_path: Path) -> None:
    twin = ranks2.run(train, tmp_path / "of two", range(3), None, timeout=300)[0]
    ranks3.run(train, tmp_path / "of two", range(3, 5), twin, timeout=300)
