"""The work of every rank: training, and what is due between updates. Rank 0 informs the user."""

import os
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from zero_optim.demo import metrics, text, trace
from zero_optim.demo.config import RunConfig
from zero_optim.demo.display import Display
from zero_optim.demo.metrics import Metric
from zero_optim.demo.prepare import choose_device, look, run_folder
from zero_optim.demo.trainer import Shard, Trainer
from zero_optim.run.host import num_cores, use_loopback

_TRACED_AFTER = 5  # updates: the allocator and the buckets no longer change then


@record  # for the report of torchrun, if a rank fails
def run_under_torchrun(config: RunConfig) -> None:
    """Run as a rank that torchrun started."""
    local_rank, local_world_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if local_world_size == int(os.environ["WORLD_SIZE"]):
        use_loopback()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, num_cores() // local_world_size))
    if choose_device(config.device, local_world_size) == "cuda":
        torch.cuda.set_device(local_rank)
        dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank))
    else:
        dist.init_process_group("gloo")
    work(config)
    dist.destroy_process_group()


def work(config: RunConfig) -> None:
    """Train; every rank of the default process group calls."""
    is_cuda = dist.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")
    trainer = Trainer(config, device, text.load(config.text, config.context))
    if config.resume is not None:
        trainer.restore(config.resume)
    run_log = RunLog(trainer) if dist.get_rank() == 0 else None
    with nullcontext() if run_log is None else run_log.display:
        for update in _train(trainer, None if run_log is None else run_log.traced):
            if run_log is not None:
                run_log.tell(update)
    shards = trainer.shards()
    with trainer.whole():
        if run_log is not None:
            run_log.close(shards)


def _train(trainer: Trainer, traced: int | None) -> Iterator[Metric]:
    """Train to the end, and yield each update; update ``traced`` is profiled."""
    config = trainer.config
    if trainer.step == 0:
        yield Metric(step=0, val_loss=trainer.evaluate())
    stall: float | None = None
    while trainer.step < config.steps:
        is_traced = trainer.step + 1 == traced
        with trace.traced(Path(config.out) / trace.EVENTS) if is_traced else nullcontext():
            update = replace(trainer.update(), save_stall=stall)
        yield replace(update, val_loss=trainer.evaluate()) if trainer.is_due(config.eval_every) else update
        stall = trainer.save() if trainer.is_due(config.save_every) else None
    trainer.finish_saving()


class RunLog:
    """Writes to the terminal and the run folder, after the trainer is restored. No communication."""

    def __init__(self, trainer: Trainer) -> None:
        config = trainer.config
        self._trainer = trainer
        self._folder = Path(config.out)
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / "config.json").write_text(config.to_json() + "\n")
        self._records = [] if config.resume is None else metrics.read(run_folder(config.resume), trainer.step)
        metrics.write(self._folder, self._records)
        self._began = perf_counter()
        self.traced = min(trainer.step + _TRACED_AFTER, config.steps - 1) + 1 if config.trace else None
        self.display = Display(trainer.step, config.steps)
        self._show_header()

    def _show_header(self) -> None:
        trainer, config, corpus = self._trainer, self._trainer.config, self._trainer.corpus
        numel = sum(parameter.numel() for parameter in trainer.gpt.parameters())
        sizes = (
            f"layers {config.layers}, width {config.width}, heads {config.heads}, context {config.context}"
        )
        fact = self.display.fact
        fact("model", f"GPT of {numel:,} parameters: {sizes}")
        fact("text", f"{corpus.name}, {corpus.numel:,} bytes, the last tenth held out")
        fact("optimizer", f"{self._what_is_sharded()} ({trainer.device.type}, {dist.get_backend()})")
        fact("updates", f"{config.steps:,}, each of {config.batch_size} x {config.context} bytes")
        if config.resume is not None:
            source = look(Path(config.resume))
            fact("resumed", f"from update {source.step}, {config.resume}")
            if source.text_digest != corpus.digest:
                fact("note", "the text is not the one that the checkpoint was trained on")

    def _what_is_sharded(self) -> str:
        config, count = self._trainer.config, dist.get_world_size()
        also = {"state": "", "gradients": " and gradients", "parameters": ", gradients and parameters"}
        ranks = "1 rank" if count == 1 else f"{count} ranks"
        return f"{config.optimizer}{also[config.shard]} sharded over {ranks}"

    def tell(self, update: Metric) -> None:
        """Record and show one update; draw the losses if a save is next, and a profile if there is one."""
        self._records.append(update)
        metrics.append(self._folder, update)
        self.display.update(update)
        if update.step == self.traced:
            spans = trace.spans_of(self._folder / trace.EVENTS)
            trace.draw([(f"update {update.step} on rank 0", spans)], self._folder / trace.PICTURE)
            self.display.say(
                f"traced: {trace.hidden(spans):.0%} of reduce, step and gather overlapped with forward and "
                f"backward, see {self._folder / trace.PICTURE}"
            )
        if update.step and self._trainer.is_due(self._trainer.config.save_every):
            metrics.draw(self._folder, self._records, self._what_is_sharded())

    def close(self, shards: Sequence[Shard]) -> None:
        """Show the result of the run."""
        trainer, fact = self._trainer, self.display.fact
        losses = [loss for _, loss in metrics.validations(self._records)]
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
