"""Cases: a fully sharded model whose owners keep everything on the CPU, beside the same done by hand."""

import copy

import torch
from torch import Tensor, nn

from ddp_pairs import batch
from gpu.setting import Here
from parity_reference import InRankOrder
from training import assert_same_bits
from zero_optim import ZeroRedundancyOptimizer, checkpoint
from zero_optim.ddp import FullyShardedDataParallel, unsharded

STEPS = 5


def on_host(here: Here, passes: int, scales: bool) -> None:
    """Gradients are made on the device; one ``torch.optim.AdamW`` over CPU tensors steps with their average.

    On the CPU there is nothing to offload: the rest is run.
    """
    model, twin = _made(here), InRankOrder(_made(here), by_pass=True)
    theirs = [nn.Parameter(param.detach().cpu().clone()) for param in twin.parameters()]
    plain = torch.optim.AdamW(theirs, lr=0.05)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.05)
    offload = {"offload": "cpu"} if here.is_cuda else {}
    wrapped = FullyShardedDataParallel(model, optimizer, units=[model[0], model[2]], **offload)
    scaler = torch.amp.GradScaler(here.device.type, init_scale=2.0**8, enabled=scales)
    for number in range(STEPS):
        optimizer.zero_grad()
        twin.zero_grad()
        for part in range(passes):
            here.sleep()
            scaler.scale(_loss(wrapped, here, passes * number + part)).backward()
            _loss(twin, here, passes * number + part).backward()
        scaler.step(optimizer)
        scaler.update()
        for mine, param in zip(theirs, twin.parameters(), strict=True):
            mine.grad = param.grad.cpu()
        plain.step()
        with torch.no_grad():
            for param, mine in zip(twin.parameters(), theirs, strict=True):
                param.copy_(mine)
        with torch.no_grad(), unsharded(wrapped.module):
            got = [param.detach().clone() for param in model.parameters()]
        assert_same_bits(got, list(twin.parameters()), number)
    _check_places(here, wrapped, optimizer)


def saved(here: Here) -> None:
    """A checkpoint of what is on the CPU is loaded, there and to the device; both train on alike."""
    models = [_made(here) for _ in range(2)]
    pairs = []
    for number, model in enumerate(models):
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.0625, momentum=0.5)
        offload = {"offload": "cpu"} if here.is_cuda and number == 0 else {}
        wrapped = FullyShardedDataParallel(model, optimizer, units=[model[0], model[2]], **offload)
        pairs.append((wrapped, optimizer))
    for step in range(2):
        _train(pairs[0], here, step)
    checkpoint.save(here.folder / "saved", model=pairs[0][0], optimizer=pairs[0][1])
    for wrapped, optimizer in pairs:
        checkpoint.load(here.folder / "saved", model=wrapped, optimizer=optimizer)
    one, other = (copy.deepcopy(wrapped.state_dict()) for wrapped, _ in pairs)
    assert_same_bits(list(one.values()), list(other.values()), "loaded")
    for pair in pairs:
        _train(pair, here, 2)
    _check_places(here, *pairs[0])


def _made(here: Here) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3)).to(
        here.device
    )


def _loss(model: nn.Module, here: Here, number: int) -> Tensor:
    return model(batch(number, 5, 6).to(here.device)).square().mean()


def _train(pair: tuple[FullyShardedDataParallel, ZeroRedundancyOptimizer], here: Here, number: int) -> None:
    wrapped, optimizer = pair
    optimizer.zero_grad()
    _loss(wrapped, here, number).backward()
    optimizer.clip_grad_norm_(0.5)
    optimizer.step()


def _check_places(here: Here, wrapped: FullyShardedDataParallel, optimizer: ZeroRedundancyOptimizer) -> None:
    """What a rank keeps is in pinned memory of the CPU, and nothing of it is on the device."""
    assert wrapped.units.nbytes_live() == 0
    rows = [*wrapped.local_state_dict().values()]
    state = [value for entries in optimizer.state.values() for value in entries.values() if value.dim()]
    grads = [getattr(param.grad, "piece", param.grad) for param in optimizer.owned_parameters()]
    kept = [each for each in (*rows, *state, *grads) if each is not None]
    assert kept
    if here.is_cuda:
        assert {each.device.type for each in kept} == {"cpu"}
        assert all(each.is_pinned() for each in rows)
