"""Choose which parameters share a bucket. Pure arithmetic, no torch; the optimizer and ``ddp`` call it."""

from collections.abc import Hashable, Sequence


def assign_buckets(
    keys: Sequence[Hashable],
    nbytes: Sequence[int],
    cap_nbytes: int | Sequence[int],
    order: Sequence[int] | None = None,
    *,
    overflow: bool = False,
) -> list[list[int]]:
    """Fill buckets with neighbouring parameters of the same key, up to the cap.

    Args:
        keys: what must be equal within a bucket (dtype, device, …), one key for each parameter.
        nbytes: size of each parameter in bytes.
        cap_nbytes: the largest size of a bucket of several parameters. Several caps are for the first,
        second, …
            bucket of each key; all later buckets have the last cap.
        order: parameter indices in the order in which buckets take them; None for the last registered
        first, about
            as the backward pass reaches them.
        overflow: close a bucket after the parameter that reaches the cap, even if it goes beyond, as
        PyTorch's
            reducer does.

    Returns:
        For each bucket the parameter indices, in the order taken. Buckets are in the order in which they
        became full; those that never did come last.
    """
    caps = [cap_nbytes] if isinstance(cap_nbytes, int) else list(cap_nbytes)
    if not caps or min(caps) < 1:
        raise ValueError(f"expected a bucket capacity of at least 1 byte, got {cap_nbytes}")
    if len(keys) != len(nbytes):
        raise ValueError(f"expected a key and a size for each parameter, got {len(keys)} and {len(nbytes)}")
    full: list[list[int]] = []
    num_full: dict[Hashable, int] = {}
    open_buckets: dict[Hashable, tuple[list[int], int]] = {}
    for index in reversed(range(len(keys))) if order is None else order:
        key = keys[index]
        bucket, size = open_buckets.get(key, ([], 0))
        cap = caps[min(num_full.get(key, 0), len(caps) - 1)]
        if bucket and (size >= cap if overflow else size + nbytes[index] > cap):
            full.append(bucket)
            num_full[key] = num_full.get(key, 0) + 1
            bucket, size = [], 0
        bucket.append(index)
        open_buckets[key] = (bucket, size + nbytes[index])
    return full + [bucket for bucket, _ in open_buckets.values()]
