"""Training with parameters sharded in replicas of a mesh, compared with PyTorch's FSDP2 on the same mesh.

The GPT of `models.py`, each block a unit, AdamW(fused), one thread a rank. The rows of the mesh are replicas:
S ranks in each of R. Contenders take turns in one run. Units are *resharded*: freed after the forward pass
and gathered again in the backward pass. The ideal are, from each rank, 3 (S-1)/S times the parameters' bytes
inside its replica, and 2 (R-1)/R times a rank's part of them across.

With `--link` each rank has a link to a switch, and *wire* is what its interface sends, in parts of the ideal.
"""

from typing import Any

from fully_sharded import Wrapped, fsdp2, nbytes_sent, optimizer_of
from harness import arguments, launch, medians, record, show, time_interleaved
from link import Link, add_options, linked, rate_of, where
from models import Gpt, Workload, workload
from recipes import CONSECUTIVE, Contender, training
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from zero_optim import ZeroRedundancyOptimizer
from zero_optim.ddp import FullyShardedDataParallel

FSDP2, OURS = "FSDP2", "ours"


def ours(model: Gpt, *, mesh: DeviceMesh) -> Wrapped:
    replica = mesh["shard"].get_group()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), process_group=replica, **optimizer_of(model))
    return Wrapped(FullyShardedDataParallel(model, optimizer, mesh=mesh, units=[*model.blocks]), optimizer)


KINDS = {FSDP2: fsdp2, OURS: ours}


def worker(replicas: int, size: int, rounds: int, link: Link | None) -> dict[str, Any]:
    """Time both, then count the bytes of a turn of each; runs on each rank."""
    mesh = init_device_mesh("cpu", (replicas, size), mesh_dim_names=("replicate", "shard"))
    contenders: dict[str, Contender] = {}
    for kind, make in KINDS.items():
        work: Workload = workload("gpt")
        assert isinstance(work.model, Gpt)
        wrapped = make(work.model, mesh=mesh)
        contenders[kind] = training(work, wrapped.model, wrapped.optimizer)
    times = time_interleaved({kind: each.turn for kind, each in contenders.items()}, rounds, warmup=1)
    return {
        "seconds": {kind: seconds / CONSECUTIVE for kind, seconds in medians(times).items()},
        "nbytes": {kind: nbytes_sent(each, link) for kind, each in contenders.items()},
        "param_nbytes": contenders[OURS].nbytes,
    }


def measure(replicas: int, size: int, rounds: int, rate: str | None) -> dict[str, Any]:
    ranks = replicas * size
    with linked(rate, ranks) as link:
        of_ranks = launch(ranks, worker, replicas, size, rounds, link, link=link)
    run = {"replicas": replicas, "size": size, "rate": rate, **of_ranks[0]}
    return run | {"nbytes": [rank["nbytes"] for rank in of_ranks]}


def tell(run: dict[str, Any]) -> None:
    """Print the table of a run."""
    replicas, size, times = run["replicas"], run["size"], run["seconds"]
    ideal = 3 * (size - 1) / size * run["param_nbytes"]
    ideal += 2 * (replicas - 1) / replicas * run["param_nbytes"] / size
    rows = []
    for kind, seconds in times.items():
        shown = []
        for name in ("metrics", "wire"):
            sent = [of_rank[kind][name] / ideal for of_rank in run["nbytes"] if name in of_rank[kind]]
            shown.append(f"{sum(sent) / len(sent):.4f}" if sent else "")
        rows.append([kind, f"{seconds * 1e3:.1f}", f"{seconds / times[FSDP2]:.3f}", *shown])
    title = (
        f"GPT, AdamW, {replicas} replicas of {size} ranks over {where(run['rate'])}: an iteration, resharded"
    )
    show(title, ("", "ms", "/ FSDP2's", "metrics() sent / ideal", "wire / ideal"), rows)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=6, metavar="N", help="timed turns (6)")
    parser.add_argument("--replicas", type=int, default=2, metavar="R", help="rows of the mesh (2)")
    parser.add_argument("--size", type=int, default=2, metavar="S", help="ranks of a replica (2)")
    add_options(parser)
    options = parser.parse_args()
    run = measure(options.replicas, options.size, options.rounds, rate_of(options))
    tell(run)
    record("mesh", {"runs": [run]}, dry=options.dry)


if __name__ == "__main__":
    main()
