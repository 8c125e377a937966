"""Assignment of parameters to buckets. Pure arithmetic, no torch."""

from collections.abc import Hashable, Sequence


def assign_buckets(
    keys: Sequence[Hashable],
    nbytes: Sequence[int],
    cap_nbytes: int | Sequence[int],
    order: Sequence[int] | None = None,
    *,
    overflow: bool = False,
) -> list[list[int]]:
    """Fill buckets with neighbouring parameters of equal key; return the parameter indices of each.

    ``cap_nbytes`` limits buckets of several parameters; a list has caps for the first, second, … bucket of a
    key. ``order`` is by default the last registered first, roughly as in backward. ``overflow`` includes the
    parameter that reaches the cap, as PyTorch's reducer does. Incomplete buckets come last. ValueError for a
    cap below 1.
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
