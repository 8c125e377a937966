"""Whole runs on the model of streams: the library orders all that it does on an accelerator."""

from typing import Any

import pytest
import torch

from pool import Ranks
from streams_runs import (
    Found,
    Run,
    clip,
    clip_after_another_pass,
    clip_on_device,
    consolidate,
    evaluate_beside,
    join,
    leave_middle_out,
    middle_beside,
    on_model,
    reduce_scatters,
    replace_data,
    save,
)
from zero_optim.ddp import PrecisionPolicy
from zero_optim.hooks import allreduce_hook, bf16_compress_wrapper, fp16_compress_hook

EVERYWHERE: dict[str, object] = {}
OWNERS: dict[str, object] = {"gradients": "owners"}
RUNS: dict[str, dict[str, Any]] = {
    "a plain step": {},
    "AdamW": {"options": {"optimizer_class": torch.optim.AdamW, "lr": 0.01}},
    "zero_step": {"overlap": EVERYWHERE},
    "zero_step to owners": {"overlap": OWNERS},
    "zero_step at the end": {"overlap": {"interleave": False}},
    "lazy gathers": {"lazily": True},
    "zero_step and lazy gathers": {"overlap": EVERYWHERE, "lazily": True},
    "packed gathers": {"options": {"parameters_as_bucket_view": False}},
    "zero_step and packed gathers": {"overlap": EVERYWHERE, "options": {"parameters_as_bucket_view": False}},
    "lazy packed gathers": {"lazily": True, "options": {"parameters_as_bucket_view": False}},
    "masters and averages": {"options": {"master_dtype": torch.float64, "ema_decay": 0.9}},
    "zero_step, masters and averages": {
        "overlap": EVERYWHERE,
        "options": {"master_dtype": torch.float64, "ema_decay": 0.9},
    },
    "two streams in a model": {"before": middle_beside},
    "two streams in a model and zero_step": {"before": middle_beside, "overlap": EVERYWHERE},
    "replaced data": {"before": replace_data},
    "replaced data and zero_step": {"before": replace_data, "overlap": EVERYWHERE},
    "an evaluation beside": {"before": evaluate_beside, "between": join},
    "an evaluation beside lazy gathers": {"before": evaluate_beside, "between": join, "lazily": True},
    "an evaluation beside zero_step": {
        "before": evaluate_beside,
        "between": join,
        "lazily": True,
        "overlap": EVERYWHERE,
    },
    "gradients as views of buckets": {"ddp_options": {"gradient_as_bucket_view": True}},
    "gradients as views and zero_step": {
        "ddp_options": {"gradient_as_bucket_view": True},
        "overlap": EVERYWHERE,
    },
    "perhaps unused parameters": {"ddp_options": {"find_unused_parameters": True}},
    "perhaps unused parameters and zero_step": {
        "ddp_options": {"find_unused_parameters": True},
        "overlap": EVERYWHERE,
    },
    "perhaps unused parameters, two streams": {
        "ddp_options": {"find_unused_parameters": True},
        "before": middle_beside,
    },
    "a static graph": {"ddp_options": {"static_graph": True}},
    "clipping": {"after": clip},
    "clipping, norms on the device": {"after": clip_on_device},
    "sharded gradients, clipping, norms on the device": {"sharded": {}, "after": clip_on_device},
    "sharded gradients": {"sharded": {}},
    "sharded gradients, clipping": {"sharded": {}, "after": clip, "lazily": True},
    "sharded gradients, two streams in a model": {"sharded": {}, "before": middle_beside},
    "sharded gradients, two streams in a bucket": {
        "sharded": {},
        "before": middle_beside,
        "options": {"optimizer_class": torch.optim.SGD, "lr": 0.1, "bucket_cap_mb": 1.0},
    },
    "sharded gradients, two passes": {"sharded": {}, "after": clip_after_another_pass},
    "sharded gradients, perhaps unused": {"sharded": {"find_unused_parameters": True}},
    "sharded parameters": {"fully": {}},
    "sharded parameters kept": {"fully": {"reshard_after_forward": False}, "after": clip},
    "sharded parameters, some kept": {"fully": {"reshard_after_forward": 1}},
    "sharded parameters, perhaps unused": {"fully": {"find_unused_parameters": True}},
    "sharded parameters, two passes": {"fully": {}, "after": clip_after_another_pass},
    "sharded parameters, two streams in a model": {"fully": {}, "before": middle_beside},
    "sharded parameters, an evaluation beside": {"fully": {}, "before": evaluate_beside, "between": join},
    "sharded parameters, an evaluation between both passes": {
        "fully": {},
        "between": evaluate_beside,
        "after": join,
    },
    "sharded parameters kept, an evaluation between both passes": {
        "fully": {"reshard_after_forward": False},
        "between": evaluate_beside,
        "after": join,
    },
    "sharded parameters in another dtype": {
        "fully": {"mixed_precision": PrecisionPolicy(params=torch.bfloat16)}
    },
    "sharded parameters, a save beside": {"fully": {}, "before": save},
    "sharded parameters, masters and averages": {
        "fully": {},
        "options": {"master_dtype": torch.float64, "ema_decay": 0.9},
    },
    **{
        f"{kind}, unused on one rank": {"before": leave_middle_out, **options}
        for kind, options in {
            "gradients": {"ddp_options": {"find_unused_parameters": True}},
            "gradients, a static graph": {"ddp_options": {"static_graph": True}},
            "zero_step": {"ddp_options": {"find_unused_parameters": True}, "overlap": EVERYWHERE},
            "zero_step to owners": {"ddp_options": {"find_unused_parameters": True}, "overlap": OWNERS},
            "zero_step and lazy gathers": {
                "ddp_options": {"find_unused_parameters": True},
                "overlap": EVERYWHERE,
                "lazily": True,
            },
            "sharded gradients": {"sharded": {"find_unused_parameters": True}},
            "sharded gradients, a static graph": {"sharded": {"static_graph": True}},
            "sharded parameters": {"fully": {"find_unused_parameters": True}},
            "sharded parameters, a static graph": {"fully": {"static_graph": True}},
            "sharded parameters kept": {
                "fully": {"find_unused_parameters": True, "reshard_after_forward": False}
            },
            "sharded parameters, some kept": {
                "fully": {"find_unused_parameters": True, "reshard_after_forward": 1}
            },
        }.items()
    },
    "consolidation": {"before": consolidate},
    "a save beside": {"before": save},
    "reduce-scatters on two streams": {"after": reduce_scatters},
    "fp16": {"hook": fp16_compress_hook},
    "fp16 and zero_step": {"hook": fp16_compress_hook, "overlap": EVERYWHERE},
    "in bf16": {"hook": bf16_compress_wrapper(allreduce_hook)},
}


def races_of(name: str) -> list[Found]:
    # A save that goes on uses a process group of gloo's, beside whatever else there is.
    return on_model(lambda: Run(**RUNS[name]), is_nccl="a save beside" not in name)


REPEAT = {  # what others show for each of two things
    "AdamW",
    "zero_step at the end",
    "zero_step and packed gathers",
    "lazy packed gathers",
    "zero_step, masters and averages",
    "two streams in a model and zero_step",
    "replaced data and zero_step",
    "an evaluation beside zero_step",
    "gradients as views and zero_step",
    "perhaps unused parameters and zero_step",
    "perhaps unused parameters, two streams",
    "sharded gradients, clipping, norms on the device",
    "sharded gradients, perhaps unused",
    "sharded gradients, two streams in a bucket",
    "sharded parameters, some kept",
    "sharded parameters, perhaps unused",
    "sharded parameters kept, an evaluation between both passes",
    "sharded parameters, masters and averages",
    "gradients, a static graph, unused on one rank",
    "zero_step and lazy gathers, unused on one rank",
    "sharded gradients, a static graph, unused on one rank",
    "sharded parameters, a static graph, unused on one rank",
    "sharded parameters kept, unused on one rank",
    "sharded parameters, some kept, unused on one rank",
    "fp16 and zero_step",
    "in bf16",
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in REPEAT)) for name in RUNS]
)
def test_a_run_is_ordered(ranks2: Ranks, name: str) -> None:
    assert RUNS.keys() >= REPEAT
    for rank, found in enumerate(ranks2.run(races_of, name)):
        assert not found, "\n".join([f"rank {rank}", *(race.text for race in found)])


def test_reduce_scatters_of_one_rank_are_ordered(ranks1: Ranks) -> None:
    assert ranks1.run(races_of, "reduce-scatters on two streams") == [[]]
