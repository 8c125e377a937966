"""The reducer: buckets of gradients, all-reduced during the backward pass."""
