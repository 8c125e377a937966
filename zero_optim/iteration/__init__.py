"""One iteration of an optimizer: steps, clipping, steps during the backward pass, ``Join``."""
