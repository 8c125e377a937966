"""The rows of all buckets: who owns which, and where parameters are cut. Pure arithmetic, no torch.

Note [Even twice]
    A rank waits for the fullest row of a bucket (`balance`), and for the rank that owns most of the model
    (`partition`). Owners chosen bucket by bucket make the first even. They are taken only if the whole model
    stays about as even as it can be; else owners are chosen for the whole model as if there were no buckets.
    Where parameters may be cut, a bucket with a fullest row far above the mean is cut in equal rows.
    These come last, on the least loaded ranks: they even out what whole parameters left uneven.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from zero_optim.plan.balance import RankLoads, fullest_row
from zero_optim.plan.cuts import even_rows, is_uneven, longest_row, min_row_nbytes
from zero_optim.plan.layout import Layout, in_order, whole
from zero_optim.plan.partition import assign_owners, rank_loads

# The fullest rank may own this much more than the mean for the sake of even buckets.
TOLERATED = 1.05


@dataclass(frozen=True, slots=True)
class Sizes:
    """The numbers of all parameters that are planned together; one for each in every sequence.

    Args:
        numels: elements.
        item_nbytes: bytes of an element.
        costs: what owning the parameter costs, in the unit of the loads; a piece costs its share.
        steps: elements between two places where it may be cut; 0 if it may not be cut.
        alignments: elements; it starts at a multiple of that.
    """

    numels: Sequence[int]
    item_nbytes: Sequence[int]
    costs: Sequence[float]
    steps: Sequence[int]
    alignments: Sequence[int]

    def nbytes_of(self, bucket: Sequence[int]) -> list[int]:
        """Return the bytes of each parameter of a bucket."""
        return [self.numels[index] * self.item_nbytes[index] for index in bucket]

    def numels_of(self, bucket: Sequence[int]) -> list[int]:
        """Return the elements of each parameter of a bucket."""
        return [self.numels[index] for index in bucket]

    def cost_of(self, index: int, numel: int) -> float:
        """Return what owning some elements of a parameter costs."""
        whole_numel = self.numels[index]
        return self.costs[index] if numel == whole_numel else self.costs[index] * numel / whole_numel


@dataclass(frozen=True, slots=True)
class _Choice:
    """One way of choosing owners.

    Args:
        owners: of each parameter that is not in a bucket that is cut; 0 for the others.
        row_owners: of the rows of each bucket that is cut.
        fullest: the largest load of a rank.
    """

    owners: list[int]
    row_owners: dict[int, list[int]]
    fullest: float


def choose_rows(
    sizes: Sizes, buckets: Sequence[Sequence[int]], groups: Sequence[range], loads: Sequence[float]
) -> list[Layout]:
    """Choose the rows of every bucket. See Note [Even twice].

    Args:
        sizes: of all parameters.
        buckets: for each its parameters, by index; every parameter is in exactly one. The parameters of a
            bucket have the same alignment and bytes of an element.
        groups: the indices of the parameters of each parameter group.
        loads: what each rank owns already, in the unit of the costs.
    """
    cut = _cut_layouts(sizes, buckets, len(loads))
    chosen = _bucket_by_bucket(sizes, buckets, cut, loads)
    mean = (sum(loads) + sum(sizes.costs)) / len(loads)
    if chosen.fullest > TOLERATED * mean:
        other = _group_by_group(sizes, buckets, cut, groups, loads)
        chosen = other if other.fullest < chosen.fullest else chosen
    return [
        _with_owners(cut[number], chosen.row_owners[number])
        if number in cut
        else whole(
            sizes.numels_of(bucket), [chosen.owners[index] for index in bucket], sizes.alignments[bucket[0]]
        )
        for number, bucket in enumerate(buckets)
    ]


def _with_owners(layout: Layout, owners: Sequence[int]) -> Layout:
    rows = zip(layout.rows, owners, strict=True)
    return Layout(layout.numels, tuple(row._replace(owner=owner) for row, owner in rows))


def _cut_layouts(sizes: Sizes, buckets: Sequence[Sequence[int]], num_ranks: int) -> dict[int, Layout]:
    """Lay out the buckets that are better cut. Their rows have the numbers 0, 1, 2, … for owners."""
    if num_ranks == 1 or not any(sizes.steps):
        return {}
    total = sum(numel * nbytes for numel, nbytes in zip(sizes.numels, sizes.item_nbytes, strict=True))
    min_nbytes = min_row_nbytes(total)
    found: dict[int, Layout] = {}
    for number, bucket in enumerate(buckets):
        nbytes, steps = sizes.nbytes_of(bucket), [sizes.steps[index] for index in bucket]
        if not any(steps) or not is_uneven(nbytes, num_ranks, min_nbytes):
            continue
        numels, alignment = sizes.numels_of(bucket), sizes.alignments[bucket[0]]
        ends = even_rows(numels, steps, min(num_ranks, sum(nbytes) // min_nbytes), alignment)
        if longest_row(ends) * sizes.item_nbytes[bucket[0]] < fullest_row(nbytes, num_ranks):
            found[number] = in_order(numels, range(len(ends)), ends, alignment)
    return found


def _bucket_by_bucket(
    sizes: Sizes, buckets: Sequence[Sequence[int]], cut: dict[int, Layout], loads: Sequence[float]
) -> _Choice:
    ranks = RankLoads(loads)
    owners = [0] * len(sizes.numels)
    for number, bucket in enumerate(buckets):
        if number not in cut:
            chosen = ranks.assign_bucket(sizes.nbytes_of(bucket), [sizes.costs[index] for index in bucket])
            for index, owner in zip(bucket, chosen, strict=True):
                owners[index] = owner
    return _Choice(owners, _row_owners(sizes, buckets, cut, ranks), ranks.fullest())


def _group_by_group(
    sizes: Sizes,
    buckets: Sequence[Sequence[int]],
    cut: dict[int, Layout],
    groups: Sequence[range],
    loads: Sequence[float],
) -> _Choice:
    in_cut = {index for number in cut for index in buckets[number]}
    members = [[index for index in group if index not in in_cut] for group in groups]
    chosen = assign_owners([[sizes.costs[i] for i in group] for group in members], len(loads), loads)
    owners = [0] * len(sizes.numels)
    added = [0.0] * len(loads)
    for group, of_group in zip(members, chosen, strict=True):
        more = rank_loads((sizes.costs[index] for index in group), of_group, len(loads))
        added = [load + extra for load, extra in zip(added, more, strict=True)]
        for index, owner in zip(group, of_group, strict=True):
            owners[index] = owner
    ranks = RankLoads([load + extra for load, extra in zip(loads, added, strict=True)])
    return _Choice(owners, _row_owners(sizes, buckets, cut, ranks), ranks.fullest())


def _row_owners(
    sizes: Sizes, buckets: Sequence[Sequence[int]], cut: dict[int, Layout], ranks: RankLoads
) -> dict[int, list[int]]:
    """Give the rows of each bucket that is cut to the least loaded ranks, and add to their loads."""
    owners: dict[int, list[int]] = {}
    for number, layout in cut.items():
        bucket, taken = buckets[number], ranks.take(len(layout.rows))
        owners[number] = [rank for _, rank in taken]
        costs = [
            sum(sizes.cost_of(bucket[extent.param], extent.stop - extent.start) for extent in row.extents)
            for row in layout.rows
        ]
        ranks.give_back((load + cost, rank) for (load, rank), cost in zip(taken, costs, strict=True))
    return owners
