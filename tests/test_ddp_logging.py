"""What is told about a wrapper: PyTorch's names and values."""

from typing import Any

import torch

from ddp_pairs import SMALL_MB, Pair, mlp, mlp_loss
from pool import on_ranks
from zero_optim.ddp import DistributedDataParallel


@on_ranks(2)
def test_names_and_values_are_those_of_pytorch() -> None:
    each: tuple[dict[str, Any], ...] = (
        {},
        {"bucket_cap_mb": SMALL_MB, "gradient_as_bucket_view": True},
        {"static_graph": True},
        {"find_unused_parameters": True},
    )
    for options in each:
        pair = Pair.of(mlp(), **options)
        built = pair.ours.get_ddp_logging_data()
        assert built["has_rebuilt_buckets"] == built["num_buckets_reduced"] == 0
        assert "rebuilt_bucket_sizes" not in built
        for number in range(3):
            for model in pair:
                mlp_loss(model, number).backward()
        theirs = pair.theirs._get_ddp_logging_data()  # type: ignore[no-untyped-call]
        ours = pair.ours._get_ddp_logging_data()  # type: ignore[no-untyped-call]
        assert ours == pair.ours.get_ddp_logging_data()
        for key in set(ours) & set(theirs):
            assert type(ours[key]) is type(theirs[key]), key
        for key in ("bucket_cap_bytes", "has_rebuilt_buckets", "world_size"):
            if key in theirs and not (key == "has_rebuilt_buckets" and options.get("static_graph")):
                assert ours[key] == theirs[key], (key, ours[key], theirs[key])
        assert ours["can_set_static_graph"] == 1
        sizes = [int(size) for size in ours["bucket_sizes"].split(", ")]
        assert sum(sizes) == 4 * sum(p.numel() for p in pair.ours.parameters())
        assert len(sizes) == ours["num_buckets_reduced"]
        if ours["has_rebuilt_buckets"]:
            assert ours["rebuilt_bucket_sizes"] == ours["bucket_sizes"]


@on_ranks(1)
def test_a_graph_with_the_same_unused_parameters_is_told_to_be_static() -> None:
    net = mlp()
    net.spare = torch.nn.Linear(8, 8)
    net.forward = lambda x: torch.nn.Sequential.forward(net[:-1], x)  # type: ignore[method-assign]
    model = DistributedDataParallel(net, find_unused_parameters=True)
    mlp_loss(model, 0).backward()
    assert model.get_ddp_logging_data()["can_set_static_graph"] == 1
