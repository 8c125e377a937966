"""The training of one rank: DDP averages the gradients, the sharded optimizer steps.

Note [Bitwise resume]
    On as many ranks a resumed run equals the uninterrupted one bit for bit: it sees the same samples (Note
    [Data order]), and updates draw no random numbers. On three or more ranks DDP's first backward pass sums
    in another order, as it rebuilds its buckets. So every run starts with a pass that trains nothing.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.optim.lr_scheduler import LambdaLR
from torch.profiler import record_function

from zero_optim import ZeroRedundancyOptimizer, checkpoint
from zero_optim.ddp import (
    DistributedDataParallel,
    FullyShardedDataParallel,
    ShardedDataParallel,
    unsharded,
)
from zero_optim.demo import optimizers, prepare
from zero_optim.demo.config import RunConfig, Schedule
from zero_optim.demo.metrics import Metric
from zero_optim.demo.model import GPT, generate
from zero_optim.demo.text import Corpus, Samples, held_out_windows
from zero_optim.demo.trace import BACKWARD, FORWARD
from zero_optim.errors import DivergedError
from zero_optim.hooks import allreduce_hook, bf16_compress_hook, fp16_compress_hook, zero_step
from zero_optim.hooks.bucket import Hook
from zero_optim.plan.pieces import numel_of, piece_of
from zero_optim.step.partial import PartialGradient

FINAL = 0.1  # fraction of the full learning rate at the last update
_KEPT = 2  # checkpoints: the newest, and the one before, in case the newest is damaged
_CAP_MB = 32.0  # the optimizer's own default
# Gradients are reduced bucket by bucket, and the default model has 3.4 MB of them: in one bucket all of them
# would be reduced when the backward pass has ended.
_SHARDED_CAP_MB = 1.0
_HOOKS: dict[str, Hook | None] = {
    "": None,
    "allreduce": allreduce_hook,
    "bf16": bf16_compress_hook,
    "fp16": fp16_compress_hook,
}


@dataclass(frozen=True, slots=True)
class Shard:
    """The measured bytes that one rank keeps; None for what it keeps whole."""

    num_parameters: int  # elements of the parameters that it owns
    state_nbytes: int
    gradient_nbytes: int | None = None  # after a backward pass
    parameter_nbytes: int | None = None  # that it keeps for good
    peak_nbytes: int | None = None  # of whole units beside these, where a pass had most


class Trainer:
    """A model, its sharded optimizer and the text; all ranks call the same methods."""

    def __init__(self, config: RunConfig, device: torch.device, corpus: Corpus) -> None:
        torch.manual_seed(config.seed)  # the same initial weights on any number of ranks
        self.config = config
        self.corpus = corpus
        self.step = 0
        self.gpt = GPT(config.shape).to(device)
        self._optimizer = ZeroRedundancyOptimizer(
            self.gpt.parameters(),
            optimizers.find(config.optimizer),
            bucket_cap_mb=_CAP_MB if config.shard == "state" else _SHARDED_CAP_MB,
            **dict(config.options),  # type: ignore[arg-type]
        )
        self._ddp = self._wrapped()
        self._scheduler: LambdaLR | None = None
        if optimizers.has_rate(self._optimizer):
            shape = config.schedule, config.warmup, config.steps
            self._scheduler = LambdaLR(self._optimizer, lambda step: rate_factor(step, *shape))
        self._saving: checkpoint.PendingSave | None = None
        self.stalls: list[float] = []  # seconds that training waited on this rank, for each checkpoint
        self._samples = Samples(corpus.train, config.context, config.seed)
        self._pass_without_update()
        hook = _HOOKS[config.hook]  # registered after the pass without an update, which must not step
        if config.overlap != "off":
            hook = zero_step(self._optimizer, hook, gradients=config.overlap)
        if hook is not None:
            self._ddp.register_comm_hook(None, hook)

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self.gpt.embedding.weight.device

    def _wrapped(self) -> TorchDistributedDataParallel | FullyShardedDataParallel:
        if self.config.shard == "gradients":
            return ShardedDataParallel(self.gpt, self._optimizer, accumulate="local")
        if self.config.shard == "parameters":
            blocks = [*self.gpt.blocks]
            return FullyShardedDataParallel(self.gpt, self._optimizer, units=blocks, accumulate="local")
        kind = DistributedDataParallel if self.config.ddp == "ours" else TorchDistributedDataParallel
        return kind(self.gpt, gradient_as_bucket_view=True)

    def _pass_without_update(self) -> int:
        """Run a pass that trains nothing, see Note [Bitwise resume]; return the bytes of its gradients."""
        torch.autograd.backward(self._entropy(self._ddp, *self._samples.take(0, 1), reduction="mean"))
        grads = [param.grad for param in self.gpt.parameters()]
        grads = [grad.piece if isinstance(grad, PartialGradient) else grad for grad in grads]
        nbytes = sum(grad.nbytes for grad in grads if grad is not None)
        self._optimizer.zero_grad()
        return nbytes

    def update(self) -> Metric:
        """Make one update."""
        began = perf_counter()
        mean = self._backward()
        dist.all_reduce(mean)
        loss = mean.item() / dist.get_world_size()
        if not math.isfinite(loss):
            raise DivergedError(f"the loss became {loss} at update {self.step + 1}: lower --opt lr")
        norm = self._clip()
        rate = self._optimizer.param_groups[0]["lr"] if self._scheduler is not None else None
        self._optimizer.step()
        if self._scheduler is not None:
            self._scheduler.step()
        self._optimizer.zero_grad()
        self.step += 1
        seconds = perf_counter() - began
        speed = self.config.batch_size * self.config.context / seconds
        return Metric(
            step=self.step, train_loss=loss, lr=rate, grad_norm=norm, seconds=seconds, tokens_per_second=speed
        )

    def _clip(self) -> float | None:
        """Clip the gradients; return the norm of all together, or None where no rank knows all."""
        limit, grads = self.config.clip, [param.grad for param in self.gpt.parameters()]
        if self.config.overlap == "owners":
            return None
        if self.config.shard != "state":
            return self._optimizer.clip_grad_norm_(limit or math.inf).item()
        if limit:
            return clip_grad_norm_(self.gpt.parameters(), limit).item()
        return get_total_norm([grad for grad in grads if grad is not None]).item()

    def _backward(self) -> Tensor:
        passes = self.config.accumulate
        count = self.config.batch_size // dist.get_world_size() // passes
        first = self.step * self.config.batch_size + dist.get_rank() * count * passes
        total = torch.zeros((), device=self.device)
        for number in range(passes):
            with nullcontext() if number == passes - 1 else self._ddp.no_sync():
                with record_function(FORWARD):
                    samples = self._samples.take(first + number * count, count)
                    loss = self._entropy(self._ddp, *samples, reduction="mean") / passes
                with record_function(BACKWARD):
                    torch.autograd.backward(loss)
            total += loss.detach()
        return total

    def _entropy(self, model: torch.nn.Module, inputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.bf16):
            logits = model(inputs.to(self.device)).flatten(0, 1)
        return F.cross_entropy(logits.float(), targets.to(self.device).flatten(), reduction=reduction)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the loss on the held-out text, in nats per byte; ranks share the work."""
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)  # nats, bytes
        place = dist.get_rank(), dist.get_world_size()
        for inputs, targets in held_out_windows(self.corpus.held_out, self.config.context, *place):
            sums[0] += self._entropy(self.gpt, inputs, targets, reduction="sum")
            sums[1] += targets.numel()
        dist.all_reduce(sums)
        nats, count = sums.tolist()
        return float(nats / count)

    def save(self) -> float:
        """Start a save in the background; CheckpointError if the last one failed.

        Returns the seconds that training waited on this rank.
        """
        self._saving = checkpoint.save_async(
            prepare.checkpoint_folder(self.config.out, self.step),
            model=self.gpt,
            optimizer=self._optimizer,
            scheduler=self._scheduler,
            extra=prepare.extra(self.config, self.step, self.corpus.digest),
            keep=_KEPT,
        )
        self.stalls.append(self._saving.stall)
        return self._saving.stall

    def finish_saving(self) -> None:
        """Wait until the last checkpoint is complete; CheckpointError if it failed."""
        if self._saving is not None:
            self._saving.wait()

    def is_due(self, every: int) -> bool:
        """Return whether something is due now that happens each ``every`` updates, and at the end."""
        return self.step == self.config.steps or (every > 0 and self.step % every == 0)

    def restore(self, path: str) -> None:
        """Load a checkpoint that any number of ranks saved."""
        self.step = checkpoint.load(
            path, model=self.gpt, optimizer=self._optimizer, scheduler=self._scheduler, random=False
        )["step"]

    def shards(self) -> list[Shard]:
        """Return what each rank keeps, by rank."""
        owned = sum(
            numel_of(piece, param.shape)
            for param, pieces in self._optimizer.pieces().items()
            if (piece := piece_of(pieces, dist.get_rank())) is not None
        )
        numbers = [owned, self._optimizer.state_nbytes()]
        if isinstance(self._ddp, FullyShardedDataParallel):
            row_nbytes = sum(bucket.row.nbytes for unit in self._ddp.units.units for bucket in unit.buckets)
            nbytes, peak = _peak_of_units(self._ddp, self._pass_without_update)
            numbers += [nbytes, row_nbytes, peak]
        elif self.config.shard == "gradients":
            numbers.append(self._pass_without_update())
        own = torch.tensor(numbers, device=self.device)
        of_ranks = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(of_ranks, own)
        return [Shard(*numbers.tolist()) for numbers in of_ranks]

    def whole(self) -> AbstractContextManager[None]:
        """Gather whole parameters for the body; all ranks enter and leave."""
        return unsharded(self.gpt, writes=False) if self.config.shard == "parameters" else nullcontext()

    def sample(self) -> tuple[str, str]:
        """Return the start of the held-out text and the model's continuation; inside `whole`."""
        prompt = self.corpus.held_out[: min(64, self.config.context)]
        added = generate(self.gpt, prompt, self.config.sample_length, self.config.seed)
        return bytes(prompt.tolist()).decode(errors="replace"), added.decode(errors="replace")


def rate_factor(step: int, schedule: Schedule, warmup: int, steps: int) -> float:
    """Return the fraction of the full learning rate at update ``step``, from 0."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    done = min(1.0, (step - warmup) / max(1, steps - 1 - warmup))
    fall = {"cosine": 0.5 * (1 + math.cos(math.pi * done)), "linear": 1 - done, "constant": 1.0}[schedule]
    return FINAL + (1 - FINAL) * fall


def _peak_of_units(model: FullyShardedDataParallel, run: Callable[[], int]) -> tuple[int, int]:
    """Run a pass; return its result, and the peak bytes of whole units on this rank.

    It measures before each module call and at each gradient: then the unit in use is whole, and the next one
    may be in flight.
    """
    live: list[int] = []

    def look(*_: object) -> None:
        live.append(model.units.nbytes_live())

    hooks = [module.register_forward_pre_hook(look) for module in model.module.modules()]
    trained: list[Any] = [param for param in model.module.parameters() if param.requires_grad]
    hooks += [param.register_hook(look) for param in trained]
    result = run()
    for hook in hooks:
        hook.remove()
    return result, max(live)
