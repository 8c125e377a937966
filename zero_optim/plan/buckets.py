"""Which parameters travel together. Pure arithmetic, no torch; used by the optimizer and by ``ddp``."""

from collections.abc import Hashable, Sequence


def assign_buckets(
    keys: Sequence[Hashable],
    nbytes: Sequence[int],
    cap_nbytes: int | Sequence[int],
    order: Sequence[int] | None = None,
    *,
    overflow: bool = False,
) -> list[list[int]]:
    """Fill buckets with neighbours of the same key, up to the cap.

    Without an order parameters are taken last registered first, since backward reaches them in about
    that order: what a bucket holds then becomes ready at about the same time.

    Args:
        keys: what must be equal within a bucket (dtype, device, …), one for each parameter.
        nbytes: size of each parameter in bytes.
        cap_nbytes: no bucket of several parameters is larger than this many bytes, but for ``overflow``; a
            parameter above the cap has a bucket to itself. Several caps are for the first, second, … bucket
            of each key, the last one for all that follow.
        order: the parameter indices in the order in which they are to be taken.
        overflow: a bucket is full once it has reached the cap, by however much the last parameter takes it
            over; PyTorch's reducer fills its buckets so.

    Returns:
        Parameter indices of each bucket, in the order taken; buckets in the order in which they were
        filled up, those left open last.

    Raises:
        ValueError: the sequences differ in length, or a cap is below 1.
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
