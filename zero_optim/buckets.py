"""Which parameters travel together. Pure arithmetic, no torch; used by the optimizer and by ``ddp``."""

from collections.abc import Hashable, Sequence


def assign_buckets(keys: Sequence[Hashable], nbytes: Sequence[int], cap_nbytes: int) -> list[list[int]]:
    """Fill buckets with neighbours of the same key, none fuller than the cap.

    Parameters are taken last registered first, since backward reaches them in about that order:
    what a bucket holds then becomes ready at about the same time.

    Args:
        keys: what must be equal within a bucket (dtype, device, …), one for each parameter.
        nbytes: size of each parameter in bytes.
        cap_nbytes: no bucket of several parameters is larger than this many bytes; a parameter
            above the cap has a bucket to itself.

    Returns:
        Parameter indices of each bucket, falling within a bucket; buckets in the order in which
        they were filled up, those left open last.

    Raises:
        ValueError: the two sequences differ in length, or the cap is below 1.
    """
    if cap_nbytes < 1:
        raise ValueError(f"expected a bucket capacity of at least 1 byte, got {cap_nbytes}")
    if len(keys) != len(nbytes):
        raise ValueError(f"expected a key and a size for each parameter, got {len(keys)} and {len(nbytes)}")
    full: list[list[int]] = []
    open_buckets: dict[Hashable, tuple[list[int], int]] = {}
    for index in reversed(range(len(keys))):
        bucket, size = open_buckets.get(keys[index], ([], 0))
        if bucket and size + nbytes[index] > cap_nbytes:
            full.append(bucket)
            bucket, size = [], 0
        bucket.append(index)
        open_buckets[keys[index]] = (bucket, size + nbytes[index])
    return full + [bucket for bucket, _ in open_buckets.values()]
