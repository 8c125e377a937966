"""Hooks that reduce to owners, and step the optimizer during the backward pass."""
