"""Cases: the ways in which scripts start, and checkpoints."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_pairs import SMALL_MB, mlp, mlp_loss
from gpu import streams
from gpu.setting import Figures, Here, NotHere, restart
from training import assert_same_bits, make_params, set_grads, train_both, twin
from zero_optim import ZeroRedundancyOptimizer, checkpoint
from zero_optim.ddp import DistributedDataParallel
from zero_optim.hooks import zero_step


def started(here: Here, how: str) -> Figures:
    """A script's first lines, then steps with and without overlap, and reduce-scatters on a group beside it.

    ``set_device`` is never called. ``how``: "no backend", "device_id" or "backend".
    """
    if how == "no backend":
        restart(here, None)
    elif how == "device_id" and here.is_cuda:
        restart(here, here.backend, device_id=here.device)
    elif how == "device_id":
        raise NotHere("the CPU takes no device_id")
    else:
        restart(here, here.backend)
    for overlap in (False, True):
        model = DistributedDataParallel(mlp().to(here.device), bucket_cap_mb=SMALL_MB)
        plain = DistributedDataParallel(mlp().to(here.device), bucket_cap_mb=SMALL_MB)
        sharded = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
        if overlap:
            model.register_comm_hook(None, zero_step(sharded, streams.averaging(here)))
            plain.register_comm_hook(None, streams.averaging(here))
        one = torch.optim.AdamW(plain.parameters(), lr=0.01)
        for number in range(4):
            for net, optimizer in ((plain, one), (model, sharded)):
                optimizer.zero_grad()
                mlp_loss(net, number).backward()
                optimizer.step()
        assert_same_bits(list(model.parameters()), list(plain.parameters()), f"with overlap: {overlap}")
        sharded.consolidate_state_dict()
    streams.lane_works(here)
    streams.summed(here, 0)
    if here.is_cuda and here.device.index:
        strays = torch.cuda.memory_allocated(0)
        assert not strays, f"{strays} bytes on the first card, which belongs to another rank"
    return {"backend": dist.get_backend_config()}


def launched(device_type: str) -> bool:
    """Train on a rank that `zero_optim.launch` started."""
    device = torch.device(device_type, dist.get_rank()) if device_type == "cuda" else torch.device("cpu")
    params = [nn.Parameter(p.detach().to(device)) for p in make_params()]
    mine = twin(params)
    plain = torch.optim.AdamW(params, lr=0.01)
    train_both(plain, ZeroRedundancyOptimizer(mine, torch.optim.AdamW, lr=0.01), 4)
    return True


class Run:
    """What is saved: parameters in two dtypes with masters and averages, and a buffer, on the device."""

    def __init__(self, here: Here) -> None:
        torch.manual_seed(1)
        parts = {"wide": mlp(), "narrow": mlp().to(torch.bfloat16), "norm": nn.BatchNorm1d(6)}
        self.model = nn.ModuleDict(parts).to(here.device)
        self.optimizer = ZeroRedundancyOptimizer(
            self.model.parameters(), torch.optim.AdamW, lr=0.01, master_dtype=torch.float32, ema_decay=0.5
        )
        self.step = 0

    def train(self, until: int) -> None:
        while self.step < until:
            set_grads(list(self.model.parameters()), self.step)
            self.optimizer.step()
            self.step += 1

    def bits(self) -> list[Tensor]:
        return [value.detach().cpu().clone() for value in self.model.state_dict().values()]


def checkpointed(here: Here, background: bool, alone: bool) -> None:
    """Save at step 3 while the device is behind, go on to step 6; resume on all ranks, or on one."""
    run = Run(here)
    run.train(3)
    here.sleep(20)
    run.optimizer.step()  # the gradients of the step before once more
    parts = {"model": run.model, "optimizer": run.optimizer}
    if background:
        pending = checkpoint.save_async(here.folder / "one", **parts, extra={"step": 3})
        run.train(6)
        pending.wait()
    else:
        checkpoint.save(here.folder / "one", **parts, extra={"step": 3})
        run.train(6)
    expected = run.bits()
    if alone:
        del run, parts
        dist.barrier()
        rank = dist.get_rank()
        dist.destroy_process_group()
        if rank:
            return
        store = dist.FileStore(str(here.folder / "store"), 1)  # type: ignore[attr-defined]
        dist.init_process_group(here.backend, store=store, rank=0, world_size=1)
    resumed(here, expected)


def resumed(here: Here, expected: list[Tensor]) -> None:
    """Load, and go on to the same bits on the same devices."""
    run = Run(here)
    with torch.no_grad():
        for param in run.model.parameters():
            param.fill_(7)
    run.step = checkpoint.load(here.folder / "one", model=run.model, optimizer=run.optimizer)["step"]
    assert run.step == 3
    run.train(6)
    for param in run.model.parameters():
        assert param.device == here.device
        entries = run.optimizer.state.get(param, {})
        strays = {key: entry.device for key, entry in entries.items() if key != "step"}
        assert set(strays.values()) <= {here.device}, strays
    assert_same_bits(run.bits(), expected, "after loading")
