"""For the tests of overlap: the same run twice, stepped after the backward pass and during it."""

import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as TorchDdp

from fake_streams import fake_streams
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.ddp import DistributedDataParallel as OurDdp
from zero_optim.hooks import zero_step
from zero_optim.step.partial import PartialGradient

WRAPPERS: dict[str, type[TorchDdp]] = {"torch": TorchDdp, "ours": OurDdp}
both_wrappers = pytest.mark.parametrize("wrapper", WRAPPERS)
BUCKET_CAP_MB = 0.0004  # several buckets, so that their order matters

Hook = Callable[[ZeroRedundancyOptimizer], Any]


def either_way(test: Callable[..., None]) -> Any:
    """Step by a thread; and ``inline``, in hooks on the group of the reductions, as on an accelerator."""
    signature = inspect.signature(test)

    @functools.wraps(test)
    def run(*args: object) -> None:
        with fake_streams() if signature.bind(*args).arguments["inline"] else nullcontext():
            test(*args)

    return pytest.mark.parametrize("inline", [False, True], ids=["thread", "inline"])(run)


class Bag(nn.Module):
    """Parameters of any shapes. They are used in another order, so that DDP's second buckets differ."""

    def __init__(self, params: Sequence[nn.Parameter], sparse: bool = False) -> None:
        super().__init__()
        self.params = nn.ParameterList([] if sparse else params)
        self.tables = nn.ModuleList(
            nn.Embedding.from_pretrained(p.detach().clone(), freeze=False, sparse=True)
            for p in (params if sparse else [])
        )

    def forward(self, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        terms = []
        for table in [*self.tables][::2] + [*self.tables][1::2]:
            rows = torch.randint(table.num_embeddings, (2,), generator=generator)
            terms.append(table(rows).sin().sum())
        for param in [*self.params][::2] + [*self.params][1::2]:
            noise = torch.randn(param.shape, generator=generator).to(param.dtype)
            terms.append((param * noise).sin().sum().float())
        return torch.stack(terms).sum()


class Net(nn.Module):
    """Convolutions, norms and layers; one layer may stay unused."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.layers = nn.Sequential(nn.Linear(36, 16), nn.ReLU(), nn.Linear(16, 12), nn.Tanh())
        self.spare = nn.Linear(12, 12)
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor, with_spare: bool = True) -> Tensor:
        hidden = self.layers(self.norm(self.conv(x)).relu().flatten(1))
        if with_spare:
            hidden = hidden + self.spare(hidden)
        return self.head(hidden)


class Embedder(nn.Module):
    """A sparse table between dense layers; a table that some batches leave out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.table = nn.Embedding(20, 6, sparse=True)
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.second(self.first(self.table(tokens)).tanh())


def inputs(step: int, rank: int | None = None) -> Tensor:
    """A batch for `Net`, different for each rank and step."""
    rank = dist.get_rank() if rank is None else rank
    return torch.randn(5, 2, 3, 3, generator=torch.Generator().manual_seed(1000 * step + rank))


def loss_of(model: nn.Module, step: int) -> Tensor:
    return model(inputs(step).to(next(model.parameters()).device)).square().mean()


def adamw(model: nn.Module, **options: Any) -> ZeroRedundancyOptimizer:
    options = {"lr": 0.01, "bucket_cap_mb": 0.001, **options}
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **options)


def built(
    wrap: Callable[..., Any], hook: Hook | None, model: Callable[[], nn.Module], **options: Any
) -> tuple[Any, ZeroRedundancyOptimizer]:
    """A model, wrapped with options, whose comm hook the optimizer makes, or without a hook."""
    net = model()
    optimizer, wrapped = adamw(net), wrap(net, **options)
    if hook is not None:
        wrapped.register_comm_hook(None, hook(optimizer))
    return wrapped, optimizer


@dataclass
class Setting:
    """How to build a run, with overlap or without.

    Args:
        wrapper: key of `WRAPPERS`.
        model: builds the model, with equal values each time.
        optimizer: builds the optimizer over the wrapped model.
        options: of the wrapper.
        hook: builds the state and the hook that reduces.
        zero: options of `zero_step`.
    """

    wrapper: str = "torch"
    model: Callable[[], nn.Module] = Net
    optimizer: Callable[[nn.Module], ZeroRedundancyOptimizer] = adamw
    options: dict[str, Any] = field(default_factory=dict)
    hook: Callable[[], tuple[Any, Any]] = lambda: (None, allreduce_hook)
    zero: dict[str, Any] = field(default_factory=dict)

    def build(self, overlap: bool) -> tuple[TorchDdp, ZeroRedundancyOptimizer]:
        """The wrapped model and its optimizer; ``overlap`` adds the hook that steps."""
        options = {"bucket_cap_mb": BUCKET_CAP_MB, **self.options}
        model = WRAPPERS[self.wrapper](self.model(), **options)
        optimizer = self.optimizer(model)
        state, hook = self.hook()
        if overlap:
            hook = zero_step(optimizer, None if "gradients" in self.zero else hook, **self.zero)
        model.register_comm_hook(state, hook)
        return model, optimizer


Grads = list[Tensor | None]
Step = Callable[[nn.Module, ZeroRedundancyOptimizer, int], Grads]


def grads_of(model: nn.Module) -> Grads:
    """Copies of the current gradients; None for partial ones."""
    grads = [param.grad for param in model.parameters()]
    return [None if grad is None or isinstance(grad, PartialGradient) else grad.clone() for grad in grads]


def plain_step(model: nn.Module, optimizer: ZeroRedundancyOptimizer, step: int) -> Grads:
    """Train one step and return the gradients after the backward pass."""
    optimizer.zero_grad()
    loss_of(model, step).backward()
    grads = grads_of(model)
    optimizer.step()
    return grads


def step_bag(model: nn.Module, optimizer: ZeroRedundancyOptimizer, step: int) -> Grads:
    optimizer.zero_grad()
    model(100 * step + dist.get_rank()).backward()
    grads = grads_of(model)
    optimizer.step()
    return grads


def assert_same_run(
    setting: Setting, step: Step = plain_step, steps: int = 20, moves: bool = True, where: object = ""
) -> tuple[nn.Module, ZeroRedundancyOptimizer]:
    """Train with and without overlap, and compare parameters and gradients bit for bit after every step."""
    (plain, one), (model, other) = setting.build(overlap=False), setting.build(overlap=True)
    before = [param.detach().clone() for param in model.parameters()]
    for number in range(steps):
        expected = step(plain, one, number)
        got = step(model, other, number)
        assert_same_params(model, plain, (where, number))
        assert_same_grads(model, got, expected, (where, number))
        if moves and number == 0:
            for (name, param), old in zip(model.named_parameters(), before, strict=True):
                assert not torch.equal(param, old), (where, name, "did not move at the first step")
    return model, other


def assert_same_params(model: nn.Module, expected: nn.Module, where: object = "") -> None:
    for (name, param), want in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert same_tensors(param, want), (where, name, param, want)


def assert_same_grads(model: nn.Module, got: Grads, expected: Grads, where: object = "") -> None:
    assert len(got) == len(expected)
    for (name, _), grad, want in zip(model.named_parameters(), got, expected, strict=False):
        if grad is None or want is None:
            assert grad is want, (where, name, grad, want)
        else:
            assert same_tensors(grad, want), (where, name, "grad", grad, want)


def same_tensors(a: Tensor, b: Tensor) -> bool:
    if a.is_sparse != b.is_sparse:
        return False
    if a.is_sparse:
        a, b = a.coalesce().to_dense(), b.coalesce().to_dense()
    return a.dtype == b.dtype and torch.equal(a.detach(), b.detach())
