"""Train a small GPT on text, with as much sharded as you choose. Copy it, and put in your model and data.

    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py --stage 2
    python examples/train_gpt.py --optimizer Muon --options lr=0.02  # one process is enough

``--stage 0`` is a script for PyTorch's DistributedDataParallel; lines marked "zero_optim" are what the other
stages change in it. With a GPU for each process it uses NCCL, otherwise the CPU and gloo.
"""

import argparse
import ast
import gc
import importlib
import math
import os
import time
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

from zero_optim import ZeroRedundancyOptimizer, checkpoint
from zero_optim.ddp import FullyShardedDataParallel, ShardedDataParallel

SHARDED = ("nothing", "state", "state and gradients", "state, gradients and parameters")  # by stage
OPTIONS: dict[str, dict[str, Any]] = {"AdamW": {"lr": 4e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}}
Matrix = partial(nn.Linear, bias=False)
Point: TypeAlias = tuple[int, float]  # an update, and a loss


class Block(nn.Module):
    """Attention, then a two-layer network, each with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width, elementwise_affine=False)
        self.qkv, self.mix = Matrix(width, 3 * width), Matrix(width, width)
        self.up, self.down = Matrix(width, 4 * width), Matrix(4 * width, width)
        nn.init.zeros_(self.mix.weight)  # so a new block is the identity
        nn.init.zeros_(self.down.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Map features to features, each (samples, positions, width)."""
        query, key, value = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mix(mixed.transpose(1, 2).flatten(2))
        out: Tensor = x + self.down(F.relu(self.up(self.norm(x))).square())
        return out


class GPT(nn.Module):
    """A transformer over bytes. All its parameters are matrices, so Muon trains it too."""

    def __init__(self, context: int, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(256, width), nn.Embedding(context, width)
        for table in (self.embedding, self.places):
            nn.init.normal_(table.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width, elementwise_affine=False), Matrix(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (samples, positions, 256) of tokens (samples, positions)."""
        x = self.embedding(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Text:
    """A text as bytes, the last tenth held out; without a file it is Python's language reference."""

    def __init__(self, context: int, file: Path | None = None) -> None:
        content = file.read_bytes() if file else "\n".join(topics.values()).encode()
        tokens = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        split = len(tokens) * 9 // 10
        self.context, self.train, self.held_out = context, tokens[:split], tokens[split:]

    def batch(self, part: Tensor, seed: int, size: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of this rank's part of ``size`` samples, equal on any number of ranks."""
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(len(part) - self.context, (size,), generator=generator)
        starts = starts.chunk(dist.get_world_size())[dist.get_rank()]
        windows = part[starts[:, None] + torch.arange(self.context + 1)].long()
        return windows[:, :-1], windows[:, 1:]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--stage", type=int, choices=range(4), default=1, help=f"sharded: {'; '.join(SHARDED)}")
    add("--optimizer", default="AdamW", help="class of torch.optim, or package.Class")
    add("--options", nargs="*", default=[], metavar="KEY=VALUE", help="of the class, such as lr=3e-4")
    add("--clip", type=float, default=1.0, help="largest norm of the gradients; 0: no limit")
    add("--bf16", action="store_true", help="forward passes in bfloat16")
    add("--text", type=Path, help="file to train on")
    add("--run", type=Path, help="folder of the run, which goes on if it has a checkpoint; None: a new one")
    add("--steps", type=int, default=400, help="updates in the whole run")
    add("--warmup", type=int, default=20, help="updates in which the learning rate rises")
    add("--batch-size", type=int, default=16, help="samples in an update, over all ranks")
    add("--accumulate", type=int, default=1, help="backward passes in an update")
    add("--save-every", type=int, default=100, help="updates between checkpoints")
    add("--eval-every", type=int, default=50, help="updates between validations")
    add("--log-every", type=int, default=10, help="updates between losses that are shown and drawn")
    for name, default in (("context", 128), ("layers", 4), ("width", 128), ("heads", 4), ("seed", 0)):
        add(f"--{name}", type=int, default=default, help="of the model")
    return parser.parse_args(arguments)


def build(args: argparse.Namespace, device: torch.device) -> tuple[GPT, Any, Any]:
    """Return the model, the wrapper that trains it, and the optimizer."""
    torch.manual_seed(args.seed)  # the same weights on every rank
    gpt = GPT(args.context, args.layers, args.width, args.heads).to(device)
    module, _, name = args.optimizer.rpartition(".")
    kind = getattr(importlib.import_module(module or "torch.optim"), name)
    given = dict(option.split("=", 1) for option in args.options)
    options = {key: ast.literal_eval(value) for key, value in given.items()} or OPTIONS.get(name, {})
    if args.stage == 0:
        return gpt, DistributedDataParallel(gpt), kind(gpt.parameters(), **options)
    optimizer = ZeroRedundancyOptimizer(gpt.parameters(), kind, **options)  # zero_optim
    if args.stage == 1:
        return gpt, DistributedDataParallel(gpt), optimizer
    if args.stage == 2:
        return gpt, ShardedDataParallel(gpt, optimizer), optimizer  # zero_optim
    return gpt, FullyShardedDataParallel(gpt, optimizer, units=[*gpt.blocks]), optimizer  # zero_optim


def rate(step: int, warmup: int, steps: int) -> float:
    """Return the part of the full learning rate at an update: it rises, then falls to a tenth as a cosine."""
    done = max(0.0, min(1.0, (step - warmup) / max(1, steps - 1 - warmup)))
    return min(1.0, (step + 1) / (warmup + 1)) * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


class Trainer:
    """A model, its optimizer and its text; all ranks call the same methods."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.device, self.text = args, device, Text(args.context, args.text)
        self.gpt, self.model, self.optimizer = build(args, device)
        self.scheduler = LambdaLR(self.optimizer, lambda step: rate(step, args.warmup, args.steps))
        self.done, self.losses, self.validations = 0, list[Point](), list[Point]()

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.args.bf16):
            logits = self.model(inputs.to(self.device))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.to(self.device).flatten())

    def update(self, step: int) -> Tensor:
        """Make one update; return the loss before it on this rank."""
        args, total = self.args, torch.zeros((), device=self.device)
        inputs, targets = self.text.batch(self.text.train, args.seed + step, args.batch_size)
        parts = zip(inputs.chunk(args.accumulate), targets.chunk(args.accumulate), strict=True)
        for number, part in enumerate(parts, 1):
            with nullcontext() if number == args.accumulate else self.model.no_sync():
                loss = self.loss(*part) / args.accumulate
                loss.backward()
            total += loss.detach()
        if args.clip and args.stage:
            self.optimizer.clip_grad_norm_(args.clip)  # zero_optim
        elif args.clip:
            clip_grad_norm_(self.model.parameters(), args.clip)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return total

    @torch.no_grad()
    def validate(self, step: int, speed: str = "") -> None:
        loss = self.loss(*self.text.batch(self.text.held_out, 0, 8 * self.args.batch_size))
        self.validations.append((step, mean(loss)))
        say(f"update {step:>4}  validation {self.validations[-1][1]:.3f}{speed}")

    def train(self) -> None:
        """Train to the end of the run, from the newest checkpoint, of any stage and number of ranks."""
        args, pending, speed = self.args, None, ""
        saved: dict[str, Any] = {"model": self.gpt, "optimizer": self.optimizer, "scheduler": self.scheduler}
        if args.stage and (newest := checkpoint.latest(args.run)):  # zero_optim
            self.done, self.losses, self.validations = checkpoint.load(newest, **saved)
        say(f"run       {args.run}, from update {self.done} to {args.steps}")
        if self.done == 0:
            self.validate(0)
        began, is_off = time.perf_counter(), dist.get_rank() > 0 or None  # None: no bar without a terminal
        for step in (bar := tqdm(range(self.done + 1, args.steps + 1), disable=is_off)):
            loss, is_last = self.update(step), step == args.steps
            if is_last or step % args.log_every == 0:
                self.losses.append((step, mean(loss)))
                tokens = args.batch_size * args.context * (step - self.done)
                speed = f", {tokens / (time.perf_counter() - began):,.0f} tokens/s"
                bar.set_postfix_str(f"loss {self.losses[-1][1]:.3f}{speed}")
            if is_last or step % args.eval_every == 0:
                self.validate(step, speed)
            if args.stage and (is_last or step % args.save_every == 0):  # zero_optim: in the background
                extra, path = [step, self.losses, self.validations], args.run / f"{step:06}"
                pending = checkpoint.save_async(path, **saved, extra=extra, keep=2)
        if pending is not None:
            pending.wait()  # zero_optim

    def draw(self) -> None:
        from matplotlib.figure import Figure

        figure = Figure(layout="constrained")
        axes = figure.add_subplot(xlabel="update", ylabel="loss, nats a byte")
        axes.plot(*zip(*self.losses, strict=True), label="training")
        axes.plot(*zip(*self.validations, strict=True), "o-", label="validation")
        axes.legend()
        figure.savefig(self.args.run / "loss.png")


def mean(loss: Tensor) -> float:
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def say(line: object) -> None:
    """Print on rank 0, above the bar."""
    if dist.get_rank() == 0:
        tqdm.write(str(line))


def start() -> torch.device:
    """Start the default process group, as torchrun says or of this process alone; return the device."""
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="0")
    device = torch.device("cpu")
    if torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    return device


def main() -> None:
    args, device = parse(), start()
    parts = dist.get_world_size() * args.accumulate
    if args.batch_size % parts:
        raise SystemExit(f"--batch-size must be a multiple of {parts}: ranks x --accumulate")
    folder = [args.run or Path("runs", time.strftime("%Y%m%d-%H%M%S"))]
    dist.broadcast_object_list(folder)  # one, though clocks differ
    (args.run,) = folder
    args.run.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(args, device)
    numel = sum(param.numel() for param in trainer.gpt.parameters())
    say(f"model     GPT of {numel:,} parameters, {args.optimizer}, {SHARDED[args.stage]} sharded")
    say(f"ranks     {dist.get_world_size()} ({device.type}, {dist.get_backend()})")
    trainer.train()
    if args.stage:
        say(trainer.optimizer.explain())  # zero_optim: what each rank holds
    if dist.get_rank() == 0:
        with suppress(ImportError):  # of matplotlib
            trainer.draw()
    del trainer
    gc.collect()  # DistributedDataParallel goes before its process group
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
