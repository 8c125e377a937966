"""Options of PyTorch's fully sharded wrappers that are not ours, each with what to do in its place."""

_PREFETCHES = "the next unit is always on its way while one is used; leave it out"
_IGNORES = "freeze these parameters and leave them out of the optimizer: they stay whole on every rank"
_OFFLOADS = (
    'offload="cpu" keeps what a rank owns on the CPU, and offload=zero_optim.ddp.Offload(folder, budget) '
    "in files"
)
_TAKES_FIRST = "every rank takes the values of rank 0; leave it out"

OF_FSDP = {
    "auto_wrap_policy": "give the modules that are gathered together, or their classes, as units=",
    "backward_prefetch": _PREFETCHES,
    "cpu_offload": _OFFLOADS,
    "device_id": "move the model before its first forward pass; for one on the meta device give device=",
    "forward_prefetch": _PREFETCHES,
    "ignored_modules": _IGNORES,
    "ignored_params": _IGNORES,
    "ignored_states": _IGNORES,
    "limit_all_gathers": _PREFETCHES,
    "mp_policy": "give it as mixed_precision=",
    "offload_policy": _OFFLOADS,
    "param_init_fn": "give it as init=",
    "sharding_strategy": "parameters are sharded; reshard_after_forward=False keeps them whole until the "
    "backward pass (SHARD_GRAD_OP), and mesh= makes replicas (HYBRID_SHARD)",
    "sync_module_states": _TAKES_FIRST,
    "use_orig_params": "parameters are always the model's own; leave it out",
}
