"""Training on every rank: DDP averages the gradients, the sharded optimizer steps; rank 0 reports.

Note [Bitwise resume]
    On as many ranks a resumed run equals the uninterrupted one bit for bit. On three or more ranks DDP's
    first backward pass sums in another order, as it rebuilds its buckets. So every run starts with a pass
    that trains nothing.
"""

import math
import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.optim.lr_scheduler import LambdaLR
from torch.profiler import record_function

from zero_optim import ZeroRedundancyOptimizer, checkpoint
from zero_optim.ddp import DistributedDataParallel, FullyShardedDataParallel, ShardedDataParallel, unsharded
from zero_optim.demo import optimizers, prepare, text, trace
from zero_optim.demo.config import RunConfig
from zero_optim.demo.display import Display, Metric, Records, Shard
from zero_optim.demo.model import GPT, generate
from zero_optim.errors import DivergedError
from zero_optim.hooks import zero_step
from zero_optim.run.host import num_cores, use_loopback

FINAL = 0.1  # fraction of the full learning rate at the last update
_KEPT = 2  # checkpoints: the newest, and the one before, in case the newest is damaged
_TRACED_AFTER = 5  # updates: the allocator and the buckets no longer change then
_CAP_MB = 32.0  # the optimizer's own default
_SHARDED_CAP_MB = 1.0  # in one bucket, gradients would be reduced when the backward pass has ended
_HOOKS: dict[str, Any] = {"allreduce": allreduce_hook, "bf16": bf16_compress_hook, "fp16": fp16_compress_hook}


@record  # for the report of torchrun, if a rank fails
def train_under_torchrun(config: RunConfig, place: prepare.Started) -> None:
    """Run as a rank that torchrun started."""
    if place.local_world_size == place.world_size:
        use_loopback()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, num_cores() // place.local_world_size))
    if prepare.choose_device(config.device, place.local_world_size) == "cuda":
        torch.cuda.set_device(place.local_rank)
        dist.init_process_group("nccl", device_id=torch.device("cuda", place.local_rank))
    else:
        dist.init_process_group("gloo")
    train(config)
    dist.destroy_process_group()


def train(config: RunConfig) -> None:
    """Train; every rank of the default process group calls."""
    is_cuda = dist.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")
    trainer = Trainer(config, device, text.load(config.text, config.context))
    if config.resume is not None:
        trainer.restore(config.resume)
    report = Report(trainer) if dist.get_rank() == 0 else None
    tell = (lambda _: None) if report is None else report.tell
    with nullcontext() if report is None else report.display:
        if trainer.step == 0:
            tell(Metric(step=0, val_loss=trainer.evaluate()))
        stall: float | None = None
        while trainer.step < config.steps:
            is_traced = report is not None and trainer.step + 1 == report.traced
            with trace.traced(Path(config.out) / trace.EVENTS) if is_traced else nullcontext():
                metric = replace(trainer.update(), save_stall=stall)
            if trainer.is_due(config.eval_every):
                metric = replace(metric, val_loss=trainer.evaluate())
            tell(metric)
            stall = trainer.save() if trainer.is_due(config.save_every) else None
        trainer.finish_saving()
    shards = trainer.shards()
    with trainer.whole():
        if report is not None:
            report.close(shards)


class Trainer:
    """A model, its sharded optimizer and the text; all ranks call the same methods."""

    def __init__(self, config: RunConfig, device: torch.device, corpus: text.Corpus) -> None:
        torch.manual_seed(config.seed)  # the same initial weights on any number of ranks
        self.config = config
        self.device = device
        self.corpus = corpus
        self.step = 0
        self.gpt = GPT(config.shape).to(device)
        self.optimizer = ZeroRedundancyOptimizer(
            self.gpt.parameters(),
            optimizers.find(config.optimizer),
            bucket_cap_mb=_CAP_MB if config.shard == "state" else _SHARDED_CAP_MB,
            **dict(config.options),  # type: ignore[arg-type]
        )
        self._ddp = self._wrapped()
        self._scheduler: LambdaLR | None = None
        if optimizers.has_rate(self.optimizer):
            shape = config.schedule, config.warmup, config.steps
            self._scheduler = LambdaLR(self.optimizer, lambda step: rate_factor(step, *shape))
        self._saving: checkpoint.PendingSave | None = None
        self.stalls: list[float] = []  # seconds that training waited on this rank, for each checkpoint
        self._pass_without_update()
        hook = _HOOKS.get(config.hook)  # registered after the pass without an update, which must not step
        if config.overlap != "off":
            hook = zero_step(self.optimizer, hook, gradients=config.overlap)  # type: ignore[arg-type]
        if hook is not None:
            self._ddp.register_comm_hook(None, hook)

    @property
    def _samples(self) -> text.Samples:
        return text.Samples(self.corpus.train, self.config.context, self.config.seed)

    def _wrapped(self) -> TorchDistributedDataParallel | FullyShardedDataParallel:
        if self.config.shard == "gradients":
            return ShardedDataParallel(self.gpt, self.optimizer, accumulate="local")
        if self.config.shard == "parameters":
            blocks = [*self.gpt.blocks]
            return FullyShardedDataParallel(self.gpt, self.optimizer, units=blocks, accumulate="local")
        kind = DistributedDataParallel if self.config.ddp == "ours" else TorchDistributedDataParallel
        return kind(self.gpt, gradient_as_bucket_view=True)

    def _pass_without_update(self) -> int:
        """Run a pass that trains nothing, see Note [Bitwise resume]; return the bytes of its gradients."""
        torch.autograd.backward(self._entropy(self._ddp, *self._samples.take(0, 1), reduction="mean"))
        # A sharded gradient has this rank's rows in ``piece``.
        grads = [getattr(param.grad, "piece", param.grad) for param in self.gpt.parameters()]
        nbytes: int = sum(grad.nbytes for grad in grads if grad is not None)
        self.optimizer.zero_grad()
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
        rate = self.optimizer.param_groups[0]["lr"] if self._scheduler is not None else None
        self.optimizer.step()
        if self._scheduler is not None:
            self._scheduler.step()
        self.optimizer.zero_grad()
        self.step += 1
        seconds = perf_counter() - began
        speed = self.config.batch_size * self.config.context / seconds
        return Metric(self.step, loss, None, rate, norm, seconds, speed)

    def _backward(self) -> Tensor:
        passes = self.config.accumulate
        count = self.config.batch_size // dist.get_world_size() // passes
        first = self.step * self.config.batch_size + dist.get_rank() * count * passes
        total = torch.zeros((), device=self.device)
        for number in range(passes):
            with nullcontext() if number == passes - 1 else self._ddp.no_sync():
                with record_function(trace.FORWARD):
                    samples = self._samples.take(first + number * count, count)
                    loss = self._entropy(self._ddp, *samples, reduction="mean") / passes
                with record_function(trace.BACKWARD):
                    torch.autograd.backward(loss)
            total += loss.detach()
        return total

    def _clip(self) -> float | None:
        """Clip the gradients; return the norm of all together, or None where no rank knows all."""
        limit, grads = self.config.clip, [param.grad for param in self.gpt.parameters()]
        if self.config.overlap == "owners":
            return None
        if self.config.shard != "state":
            return self.optimizer.clip_grad_norm_(limit or math.inf).item()
        if limit:
            return clip_grad_norm_(self.gpt.parameters(), limit).item()
        return get_total_norm([grad for grad in grads if grad is not None]).item()

    def _entropy(self, model: torch.nn.Module, inputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.bf16):
            logits = model(inputs.to(self.device)).flatten(0, 1)
        return F.cross_entropy(logits.float(), targets.to(self.device).flatten(), reduction=reduction)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the loss on the held-out text, in nats per byte; ranks share the work."""
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)  # nats, bytes
        place = dist.get_rank(), dist.get_world_size()
        for inputs, targets in text.held_out_windows(self.corpus.held_out, self.config.context, *place):
            sums[0] += self._entropy(self.gpt, inputs, targets, reduction="sum")
            sums[1] += targets.numel()
        dist.all_reduce(sums)
        nats, count = sums.tolist()
        return float(nats / count)

    def is_due(self, every: int) -> bool:
        """Whether something is due that happens each ``every`` updates, and at the end."""
        return self.step == self.config.steps or (every > 0 and self.step % every == 0)

    def save(self) -> float:
        """Start a save in the background; return the seconds that training waited on this rank."""
        self._saving = checkpoint.save_async(
            prepare.checkpoint_folder(self.config.out, self.step),
            model=self.gpt,
            optimizer=self.optimizer,
            scheduler=self._scheduler,
            extra=prepare.extra(self.config, self.step, self.corpus.digest),
            keep=_KEPT,
        )
        self.stalls.append(self._saving.stall)
        return self._saving.stall

    def finish_saving(self) -> None:
        """Wait until the last checkpoint is complete."""
        if self._saving is not None:
            self._saving.wait()

    def restore(self, path: str) -> None:
        """Load a checkpoint that any number of ranks saved."""
        self.step = checkpoint.load(
            path, model=self.gpt, optimizer=self.optimizer, scheduler=self._scheduler, random=False
        )["step"]

    def shards(self) -> list[Shard]:
        """Return what each rank keeps, by rank."""
        own: list[int] = []
        if isinstance(self._ddp, FullyShardedDataParallel):
            gradients, peak = self._peak_of_units(self._ddp)
            own = [gradients, sum(b.row.nbytes for unit in self._ddp.units.units for b in unit.buckets), peak]
        elif self.config.shard == "gradients":
            own = [self._pass_without_update()]
        of_ranks: list[list[int]] = [[]] * dist.get_world_size()
        dist.all_gather_object(of_ranks, own)
        holdings = self.optimizer.explain(quiet=True).ranks
        return [Shard(rank.numel, rank.state_nbytes, *of_ranks[rank.rank]) for rank in holdings]

    def _peak_of_units(self, model: FullyShardedDataParallel) -> tuple[int, int]:
        """Run a pass; return the bytes of its gradients, and the peak bytes of whole units on this rank."""
        live: list[int] = []  # before each module's call and at each gradient, where the unit in use is whole

        def look(*_: object) -> None:
            live.append(model.units.nbytes_live())

        hooks = [module.register_forward_pre_hook(look) for module in model.module.modules()]
        trained: list[Any] = [param for param in model.module.parameters() if param.requires_grad]
        hooks += [param.register_hook(look) for param in trained]
        gradients = self._pass_without_update()
        for hook in hooks:
            hook.remove()
        return gradients, max(live)

    def whole(self) -> AbstractContextManager[None]:
        """Gather whole parameters for the body; all ranks enter and leave."""
        return unsharded(self.gpt, writes=False) if self.config.shard == "parameters" else nullcontext()

    def sample(self) -> tuple[str, str]:
        """Return the start of the held-out text and the model's continuation; inside `whole`."""
        prompt = self.corpus.held_out[: min(64, self.config.context)]
        added = generate(self.gpt, prompt, self.config.sample_length, self.config.seed)
        return bytes(prompt.tolist()).decode(errors="replace"), added.decode(errors="replace")


def rate_factor(step: int, schedule: str, warmup: int, steps: int) -> float:
    """Return the fraction of the full learning rate at update ``step``, from 0."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    done = min(1.0, (step - warmup) / max(1, steps - 1 - warmup))
    fall = {"cosine": 0.5 * (1 + math.cos(math.pi * done)), "linear": 1 - done, "constant": 1.0}[schedule]
    return FINAL + (1 - FINAL) * fall


class Report:
    """What rank 0 shows and records, once the trainer is restored. No communication."""

    def __init__(self, trainer: Trainer) -> None:
        config, corpus = trainer.config, trainer.corpus
        self._trainer = trainer
        self._folder = Path(config.out)
        (self._folder / "config.json").write_text(config.to_json() + "\n")
        source = None if config.resume is None else prepare.run_folder(config.resume)
        self._records = Records(self._folder, source, trainer.step)
        self._began = perf_counter()
        self.traced = min(trainer.step + _TRACED_AFTER, config.steps - 1) + 1 if config.trace else None
        self.display = Display(trainer.step, config.steps)

        count = dist.get_world_size()
        also = {"state": "", "gradients": " and gradients", "parameters": ", gradients and parameters"}
        ranks = "1 rank" if count == 1 else f"{count} ranks"
        self._title = f"{config.optimizer}{also[config.shard]} sharded over {ranks}"
        numel = sum(parameter.numel() for parameter in trainer.gpt.parameters())
        sizes = (
            f"layers {config.layers}, width {config.width}, heads {config.heads}, context {config.context}"
        )
        fact = self.display.fact
        fact("model", f"GPT of {numel:,} parameters: {sizes}")
        fact("text", f"{corpus.name}, {corpus.numel:,} bytes, the last tenth held out")
        fact("optimizer", f"{self._title} ({trainer.device.type}, {dist.get_backend()})")
        fact("updates", f"{config.steps:,}, each of {config.batch_size} x {config.context} bytes")
        if config.resume is not None:
            fact("resumed", f"from update {trainer.step}, {config.resume}")
            if prepare.look(Path(config.resume)).text_digest != corpus.digest:
                fact("note", "the text is not the one that the checkpoint was trained on")

    def tell(self, metric: Metric) -> None:
        """Record and show one update; draw the losses if a save is next, and a profile if there is one."""
        self._records.append(metric)
        self.display.update(metric)
        if metric.step == self.traced:
            spans, picture = trace.spans_of(self._folder / trace.EVENTS), self._folder / trace.PICTURE
            trace.draw([(f"update {metric.step} on rank 0", spans)], picture)
            self.display.say(
                f"traced: {trace.hidden(spans):.0%} of reduce, step and gather overlapped with forward and "
                f"backward, see {picture}"
            )
        if metric.step and self._trainer.is_due(self._trainer.config.save_every):
            self._records.draw(self._title)

    def close(self, shards: list[Shard]) -> None:
        """Show the result of the run."""
        trainer, fact = self._trainer, self.display.fact
        losses = [loss for _, loss in self._records.validations()]
        sample = trainer.sample() if trainer.config.sample_length else None
        seconds = perf_counter() - self._began
        self.display.shards(shards)
        fact("validation", f"{losses[0]:.3f} -> {losses[-1]:.3f} nats per byte")
        fact("time", f"{seconds:.0f} s")
        if stalls := trainer.stalls:
            mean, most = 1e3 * sum(stalls) / len(stalls), 1e3 * max(stalls)
            waits = f"training waited {mean:.0f} ms for each (at most {most:.0f})"
            fact("checkpoints", f"{len(stalls)} written in the background; {waits}")
        fact("run folder", str(self._folder))
        if sample is not None:
            self.display.sample(*sample)
