"""The training loop of one rank: DDP averages the gradients, the sharded optimizer steps.

With ``--shard gradients`` only the owner of a parameter gets its average. With ``--shard parameters`` only
the owner keeps the parameter too: a block of the model is gathered while it is used.

Note [Bitwise resume]
    On the same number of ranks, a resumed run equals the uninterrupted one bit for bit. It sees the same
    samples (Note [Data order]), and no update draws random numbers. DDP must also sum in the same order. On
    three ranks or more its first backward pass sums in another order than the later ones, since it then makes
    other buckets. So every run, new or resumed, starts with a pass that trains nothing.
"""

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.profiler import record_function

from zero_optim import ZeroRedundancyOptimizer, checkpoint
from zero_optim.ddp import (
    DistributedDataParallel,
    FullyShardedDataParallel,
    ShardedDataParallel,
    unsharded,
)
from zero_optim.demo import optimizers, saved, schedule
from zero_optim.demo.config import RunConfig
from zero_optim.demo.metrics import Metric
from zero_optim.demo.model import GPT, generate
from zero_optim.demo.text import Corpus, Samples, held_out_windows
from zero_optim.demo.trace import BACKWARD, FORWARD
from zero_optim.demo.unit_memory import UnitMeter
from zero_optim.errors import DivergedError
from zero_optim.hooks import allreduce_hook, bf16_compress_hook, fp16_compress_hook, zero_step
from zero_optim.hooks.bucket import Hook
from zero_optim.plan.pieces import numel_of, piece_of
from zero_optim.step.partial import PartialGradient

if TYPE_CHECKING:
    from zero_optim.demo.ranks import Ranks


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
    """What one rank keeps.

    Attributes:
        num_parameters: elements of the parameters that it owns.
        state_nbytes: measured bytes of optimizer state.
        gradient_nbytes: measured bytes of gradients after a backward pass; None if it keeps all of them.
        parameter_nbytes: bytes of parameters that it keeps for good; None if it keeps all of them.
        peak_nbytes: measured bytes of whole units beside these, where a pass had most; None likewise.
    """

    num_parameters: int
    state_nbytes: int
    gradient_nbytes: int | None = None
    parameter_nbytes: int | None = None
    peak_nbytes: int | None = None


class Trainer:
    """A model, its sharded optimizer and the text. Every rank has a trainer and calls the same methods.

    Args:
        config: of the run, equal on every rank.
        ranks: this rank; the default process group exists.
        corpus: the text.
    """

    def __init__(self, config: RunConfig, ranks: "Ranks", corpus: Corpus) -> None:
        torch.manual_seed(config.seed)  # the same initial weights on any number of ranks
        self.config = config
        self.ranks = ranks
        self.corpus = corpus
        self.step = 0
        self.gpt = GPT(config.shape).to(ranks.device)
        self._optimizer = ZeroRedundancyOptimizer(
            self.gpt.parameters(),
            optimizers.find(config.optimizer),
            bucket_cap_mb=_CAP_MB if config.shard == "state" else _SHARDED_CAP_MB,
            **optimizers.keywords(config.options),
        )
        self._ddp = self._wrapped()
        self._scheduler = schedule.make(self._optimizer, config)
        self._saving: checkpoint.PendingSave | None = None
        self._samples = Samples(corpus.train, config.context, config.seed)
        self._pass_without_update()
        self._register_hook()

    def _wrapped(self) -> TorchDistributedDataParallel | FullyShardedDataParallel:
        """Wrap the model in what reduces its gradients."""
        if self.config.shard == "gradients":
            return ShardedDataParallel(self.gpt, self._optimizer, accumulate="local")
        if self.config.shard == "parameters":
            blocks = [*self.gpt.blocks]
            return FullyShardedDataParallel(self.gpt, self._optimizer, units=blocks, accumulate="local")
        kind = DistributedDataParallel if self.config.ddp == "ours" else TorchDistributedDataParallel
        return kind(self.gpt, gradient_as_bucket_view=True)

    def _register_hook(self) -> None:
        """Register the comm hook, if any. The pass without an update, which comes before, must not step."""
        config = self.config
        hook = _HOOKS[config.hook]
        if config.overlap != "off":
            hook = zero_step(self._optimizer, hook, gradients=config.overlap)
        if hook is not None:
            self._ddp.register_comm_hook(None, hook)

    def _pass_without_update(self) -> int:
        """Run a pass that trains nothing, see Note [Bitwise resume]; all ranks call.

        Returns:
            The bytes of gradients that it left on this rank.
        """
        torch.autograd.backward(self._loss(*self._samples.take(0, 1)))
        grads = [param.grad for param in self.gpt.parameters()]
        held = [grad.piece if isinstance(grad, PartialGradient) else grad for grad in grads]
        nbytes = sum(grad.nbytes for grad in held if grad is not None)
        self._optimizer.zero_grad()
        return nbytes

    def update(self) -> Metric:
        """Make one update; all ranks call."""
        began = perf_counter()
        loss = self.ranks.mean(self._backward())
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
        return Metric(
            step=self.step,
            train_loss=loss,
            lr=rate,
            grad_norm=norm,
            seconds=seconds,
            tokens_per_second=self.config.batch_size * self.config.context / seconds,
        )

    def _clip(self) -> float | None:
        """Clip the gradients and return their norm before; None with ``--overlap owners``, which has none."""
        if self.config.overlap == "owners":
            return None
        if self.config.shard != "state":
            return self._optimizer.clip_grad_norm_(self.config.clip or math.inf).item()
        if self.config.clip:
            return clip_grad_norm_(self.gpt.parameters(), self.config.clip).item()
        grads = [p.grad for p in self.gpt.parameters() if p.grad is not None]
        return get_total_norm(grads).item()

    def _backward(self) -> Tensor:
        """Compute the gradients of this rank's part of a batch, and return its mean loss."""
        passes = self.config.accumulate
        count = self.config.batch_size // self.ranks.world_size // passes
        first = self.step * self.config.batch_size + self.ranks.rank * count * passes
        total = torch.zeros((), device=self.ranks.device)
        for number in range(passes):
            last = number == passes - 1
            with nullcontext() if last else self._ddp.no_sync():
                with record_function(FORWARD):
                    loss = self._loss(*self._samples.take(first + number * count, count)) / passes
                with record_function(BACKWARD):
                    torch.autograd.backward(loss)
            total += loss.detach()
        return total

    def _loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss in nats per byte, computed through DDP."""
        return self._entropy(self._ddp, inputs, targets, reduction="mean")

    def _entropy(self, model: torch.nn.Module, inputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
        device = self.ranks.device
        with torch.autocast(device.type, torch.bfloat16, enabled=self.config.bf16):
            logits = model(inputs.to(device))
        return F.cross_entropy(
            logits.flatten(0, 1).float(), targets.to(device).flatten(), reduction=reduction
        )

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the loss on the held-out text, in nats per byte; all ranks call and share the work."""
        sums = torch.zeros(2, dtype=torch.float64, device=self.ranks.device)  # nats, bytes
        parts = held_out_windows(
            self.corpus.held_out, self.config.context, self.ranks.rank, self.ranks.world_size
        )
        for inputs, targets in parts:
            sums[0] += self._entropy(self.gpt, inputs, targets, reduction="sum")
            sums[1] += targets.numel()
        nats, count = map(float, self.ranks.total(sums))
        return nats / count

    def save(self) -> float:
        """Start a save in the background; all ranks call, and each writes what it owns.

        Returns:
            Seconds that training waited on this rank.

        Raises:
            CheckpointError: on every rank, if the previous save failed.
        """
        self._saving = checkpoint.save_async(
            saved.folder_of(self.config.out, self.step),
            model=self.gpt,
            optimizer=self._optimizer,
            scheduler=self._scheduler,
            extra=saved.extra(self.config, self.step, self.corpus.digest),
            keep=saved.KEPT,
        )
        return self._saving.stall

    def finish_saving(self) -> None:
        """Wait until the last checkpoint is complete; all ranks call.

        Raises:
            CheckpointError: on every rank, if it could not be written.
        """
        if self._saving is not None:
            self._saving.wait()

    def restore(self, path: str) -> None:
        """Load a checkpoint that any number of ranks saved; all ranks call with the same path."""
        self.step = checkpoint.load(
            path, model=self.gpt, optimizer=self._optimizer, scheduler=self._scheduler, random=False
        )["step"]

    def shards(self) -> list[Shard]:
        """Return what each rank keeps, by rank; all ranks call."""
        owned = 0
        for param, pieces in self._optimizer.pieces().items():
            piece = piece_of(pieces, self.ranks.rank)
            if piece is not None:
                owned += numel_of(piece, param.shape)
        numbers = [owned, self._optimizer.state_nbytes()]
        if isinstance(self._ddp, FullyShardedDataParallel):
            meter = UnitMeter(self._ddp)
            numbers += [self._pass_without_update(), meter.kept_nbytes, meter.stop()]
        elif self.config.shard == "gradients":
            numbers.append(self._pass_without_update())
        return [Shard(*kept) for kept in self.ranks.collect(*numbers)]

    def whole(self) -> AbstractContextManager[None]:
        """Have the whole parameters on each rank for the time of a ``with``; all ranks enter and leave it."""
        return unsharded(self.gpt, writes=False) if self.config.shard == "parameters" else nullcontext()

    def sample(self) -> tuple[str, str]:
        """Let the model continue the start of the held-out text; inside of `whole`. Does not communicate.

        Returns:
            The prompt, and the text that the model generated.
        """
        prompt = self.corpus.held_out[: min(64, self.config.context)]
        added = generate(self.gpt, prompt, self.config.sample_length, self.config.seed)
        return bytes(prompt.tolist()).decode(errors="replace"), added.decode(errors="replace")
