"""Training without sharding: the plain class of an optimizer, and sums made in the order of ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from zero_optim.step.averages import EMA
from zero_optim.step.leaves import MASTER


class ByHand(Optimizer):
    """The plain class of each group, over wide copies of narrow parameters; averages beside it."""

    def __init__(
        self,
        params: Any,
        optimizer_class: Any,
        *,
        master_dtype: torch.dtype | None = None,
        ema_decay: float | None = None,
        **options: Any,
    ) -> None:
        groups = [dict(group) if isinstance(group, dict) else group for group in params]
        groups = groups if isinstance(groups[0], dict) else [{"params": groups}]
        self.decay, self.master_dtype = ema_decay, master_dtype
        self.default, self.options = optimizer_class, options
        self.wide: dict[Tensor, nn.Parameter] = {}
        self.plain: list[Optimizer] = []
        self.averages: dict[Tensor, Tensor] = {}
        super().__init__(groups, {})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        own = dict(param_group)
        build = own.pop("optimizer_class", self.default)
        mine = [*own["params"]]
        for p in mine:
            is_narrow = self.master_dtype is not None and p.itemsize < self.master_dtype.itemsize
            self.wide[p] = nn.Parameter(p.detach().to(self.master_dtype), p.requires_grad) if is_narrow else p
            self.averages[p] = self.wide[p].detach().clone()
        self.plain.append(build([{**own, "params": [self.wide[p] for p in mine]}], **self.options))
        super().add_param_group({**self.plain[-1].param_groups[0], "params": mine})

    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group, plain in zip(self.param_groups, self.plain, strict=True):
            plain.param_groups[0].update({key: value for key, value in group.items() if key != "params"})
            for p in group["params"]:
                wide = self.wide[p]
                if wide is not p:
                    wide.grad = None if p.grad is None else p.grad.to(wide.dtype)
            plain.step()
        with torch.no_grad():
            for p, wide in self.wide.items():
                p.copy_(wide)
                if self.decay is not None:
                    self.averages[p].lerp_(wide, 1 - self.decay)
        return loss

    def entries(self) -> list[dict[str, Any]]:
        """The state of each parameter, as a consolidated state dict has it."""
        found = []
        for p, wide in self.wide.items():
            entries = next((dict(plain.state[wide]) for plain in self.plain if wide in plain.state), {})
            entries |= {MASTER: wide.detach()} if wide is not p else {}
            found.append(entries | ({EMA: self.averages[p]} if self.decay is not None else {}))
        return found

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        before = [p.detach().clone() for p in self.wide]
        with torch.no_grad():
            for p in self.wide:
                p.copy_(self.averages[p])
            yield
            for p, value in zip(self.wide, before, strict=True):
                p.copy_(value)


def summed(rows: list[Tensor]) -> Tensor:
    """Add in order; 16 bits of more than two ranks in float32."""
    dtype, first = rows[0].dtype, rows[0]
    if len(rows) > 2 and dtype in (torch.bfloat16, torch.float16):
        first = first.float()
    return sum(rows[1:], first).to(dtype)


class InRankOrder(nn.Module):
    """Averages gradients over ranks in the order of ranks, and over two replicas, as a mesh does.

    Args:
        module: the model.
        replicas: sums are made inside of each, then added.
        by_pass: each pass is averaged, and then added to what there is; else everything that there is.
    """

    def __init__(self, module: nn.Module, replicas: int = 1, by_pass: bool = False) -> None:
        super().__init__()
        self.module, self.replicas = module, replicas
        self.syncs = self.syncs_buffers = True
        for p in module.parameters():
            if p.requires_grad:
                p.register_hook(self.averaged) if by_pass else p.register_post_accumulate_grad_hook(
                    self.average
                )

    def forward(self, x: Tensor) -> Tensor:
        for buffer in self.module.buffers() if self.syncs_buffers else ():
            dist.broadcast(buffer, 0)
        self.syncs_buffers = self.syncs and torch.is_grad_enabled()  # as PyTorch's DDP does
        return self.module(x)

    def averaged(self, grad: Tensor) -> Tensor:
        if grad.is_sparse:
            return self.averaged(grad.to_dense()).to_sparse(grad.sparse_dim())
        size = dist.get_world_size()
        everyone = [torch.empty_like(grad, memory_format=torch.contiguous_format) for _ in range(size)]
        dist.all_gather(everyone, (grad * (1 / size)).contiguous())
        inner = size // self.replicas
        sums = [summed(everyone[first : first + inner]) for first in range(0, size, inner)]
        total = sum(sums[1:], sums[0])
        return torch.empty_like(grad).copy_(total)

    def average(self, p: Tensor) -> None:
        if self.syncs:
            assert p.grad is not None  # it has been accumulated
            p.grad = self.averaged(p.grad.to_dense())

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.syncs = False
        yield
        self.syncs = True
