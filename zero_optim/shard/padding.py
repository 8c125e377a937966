"""The elements of a flat tensor that belong to no parameter. Nothing here communicates.

Note [Memory that is touched late]
    Padding is sent, so it is zeroed. To zero the whole flat tensor would have all of it resident beside the
    parameters that are about to move in, one after the other, while each gives back the memory that it had.
"""

from torch import Tensor

from zero_optim.plan.layout import Layout


def zero_padding(flat: Tensor, layout: Layout, start: int = 0) -> None:
    """Zero what belongs to no parameter in elements ``[start, start + len(flat))`` of a bucket's flat tensor.

    ``flat`` is all of it, or one row.
    """
    at, stop = start, start + flat.numel()
    for row in layout.rows:
        for extent in row.extents if start <= row.start and row.stop <= stop else ():
            if extent.offset > at:
                flat[at - start : extent.offset - start].zero_()
            at = extent.end
    flat[at - start :].zero_()
