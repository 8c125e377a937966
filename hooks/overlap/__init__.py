"""The optimizer's step inside the backward pass: each bucket is reduced, stepped and gathered."""
