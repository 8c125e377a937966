"""The training loop of one rank: DDP averages the gradients, the sharded optimizer steps.

Note [Bitwise resume]
    A resumed run on as many ranks repeats the uninterrupted one bit for bit. Its samples are the
    same, see Note [Data order], and nothing in an update draws random numbers. Besides, DDP must sum
    in the same order. It moves gradients to other buckets after its first backward pass, which
    changes that order on three ranks or more, so a pass that trains nothing comes first, in fresh
    and resumed runs alike.
"""

import math
from contextlib import nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from zero_optim import ZeroRedundancyOptimizer
from zero_optim.demo import optimizers, schedule
from zero_optim.demo.checkpoint import Checkpoint
from zero_optim.demo.config import RunConfig
from zero_optim.demo.model import GPT, generate
from zero_optim.demo.records import Record
from zero_optim.demo.text import Corpus, Samples, held_out_windows

if TYPE_CHECKING:
    from zero_optim.demo.ranks import Ranks


class DivergedError(ArithmeticError):
    """The loss is no number any more."""


@dataclass(frozen=True, slots=True)
class Shard:
    """What one rank keeps: numbers of parameters, and bytes of optimizer state measured."""

    num_parameters: int
    state_nbytes: int


class Trainer:
    """A model, its sharded optimizer and the text; every rank has one and calls the same methods.

    Args:
        config: of the run, the same on every rank.
        ranks: this rank's place; the process group exists.
        corpus: the text.
    """

    def __init__(self, config: RunConfig, ranks: "Ranks", corpus: Corpus) -> None:
        torch.manual_seed(config.seed)  # the same initial weights on any number of ranks
        self.config = config
        self.ranks = ranks
        self.corpus = corpus
        self.step = 0
        self.gpt = GPT(config.shape).to(ranks.device)
        self._ddp = DistributedDataParallel(self.gpt, gradient_as_bucket_view=True)
        self._optimizer = ZeroRedundancyOptimizer(
            self.gpt.parameters(), optimizers.find(config.optimizer), **optimizers.keywords(config.options)
        )
        self._scheduler = schedule.make(self._optimizer, config)
        self._samples = Samples(corpus.train, config.context, config.seed)
        self._settle_buckets()

    def _settle_buckets(self) -> None:
        """See Note [Bitwise resume]."""
        torch.autograd.backward(self._loss(*self._samples.take(0, 1)))
        self._optimizer.zero_grad()

    def update(self) -> Record:
        """Make one update."""
        began = perf_counter()
        loss = self.ranks.mean(self._backward())
        if not math.isfinite(loss):
            raise DivergedError(f"the loss became {loss} at update {self.step + 1}: lower --opt lr")
        norm = clip_grad_norm_(self.gpt.parameters(), self.config.clip or math.inf)
        rate = self._optimizer.param_groups[0]["lr"] if self._scheduler is not None else None
        self._optimizer.step()
        if self._scheduler is not None:
            self._scheduler.step()
        self._optimizer.zero_grad()
        self.step += 1
        seconds = perf_counter() - began
        return Record(
            step=self.step,
            train_loss=loss,
            lr=rate,
            grad_norm=norm.item(),
            seconds=seconds,
            tokens_per_second=self.config.batch_size * self.config.context / seconds,
        )

    def _backward(self) -> Tensor:
        """Accumulate the gradients of this rank's part of a batch; gives the mean loss of that part."""
        passes = self.config.accumulate
        count = self.config.batch_size // self.ranks.world_size // passes
        first = self.step * self.config.batch_size + self.ranks.rank * count * passes
        total = torch.zeros((), device=self.ranks.device)
        for number in range(passes):
            last = number == passes - 1
            with nullcontext() if last else self._ddp.no_sync():
                loss = self._loss(*self._samples.take(first + number * count, count)) / passes
                torch.autograd.backward(loss)
            total += loss.detach()
        return total

    def _loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Give the mean loss, in nats a byte, through DDP."""
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
        """Give the loss on the held-out text, in nats a byte; the ranks share the work."""
        sums = torch.zeros(2, dtype=torch.float64, device=self.ranks.device)  # nats, bytes
        parts = held_out_windows(
            self.corpus.held_out, self.config.context, self.ranks.rank, self.ranks.world_size
        )
        for inputs, targets in parts:
            sums[0] += self._entropy(self.gpt, inputs, targets, reduction="sum")
            sums[1] += targets.numel()
        nats, count = map(float, self.ranks.total(sums))
        return nats / count

    def checkpoint(self) -> Checkpoint | None:
        """Bring the whole run to rank 0, where it is given; all ranks call."""
        self._optimizer.consolidate_state_dict(to=0)
        if self.ranks.rank != 0:
            return None
        return Checkpoint(
            config=self.config.to_json(),
            step=self.step,
            text_digest=self.corpus.digest,
            model=self.gpt.state_dict(),
            optimizer=self._optimizer.state_dict(),
            scheduler=self._scheduler.state_dict() if self._scheduler is not None else {},
        )

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint; all ranks call, with the same one."""
        self.gpt.load_state_dict(checkpoint.model)
        self._optimizer.load_state_dict(checkpoint.optimizer)
        if self._scheduler is not None:
            self._scheduler.load_state_dict(checkpoint.scheduler)
        self.step = checkpoint.step

    def shards(self) -> list[Shard]:
        """Measure what each rank keeps, by rank; all ranks call."""
        owned = sum(parameter.numel() for parameter in self._optimizer.owned_parameters())
        return [Shard(*numbers) for numbers in self.ranks.collect(owned, self._optimizer.state_nbytes())]

    def sample(self) -> tuple[str, str]:
        """Let the model go on from the start of the held-out text; does not communicate.

        Returns:
            What it was given, and what it made of it.
        """
        prompt = self.corpus.held_out[: min(64, self.config.context)]
        added = generate(self.gpt, prompt, self.config.sample_length, self.config.seed)
        return bytes(prompt.tolist()).decode(errors="replace"), added.decode(errors="replace")
