"""The elements of a flat tensor that belong to no parameter. Nothing here communicates.

Note [Memory that is touched late]
    Padding and rooms are sent with the parameters, so they are zero: no NaN from old memory should show in a
    debugger. But to zero a whole flat tensor would have all of its memory resident at once, beside the
    parameters that are about to move in. So only the padding is zeroed. The rest becomes resident as
    parameters are copied to it, one after the other, while each gives back the memory that it had.
"""

from torch import Tensor

from zero_optim.plan.layout import Layout


def zero_padding(flat: Tensor, layout: Layout, start: int = 0) -> None:
    """Zero what belongs to no parameter, in place; see Note [Memory that is touched late].

    Args:
        flat: elements ``[start, start + len(flat))`` of a bucket's flat tensor, 1-D: all of it, or one row.
        layout: of the bucket.
        start: as above.
    """
    at, stop = start, start + flat.numel()
    for row in layout.rows:
        for extent in row.extents if start <= row.start and row.stop <= stop else ():
            if extent.offset > at:
                flat[at - start : extent.offset - start].zero_()
            at = extent.end
    flat[at - start :].zero_()
