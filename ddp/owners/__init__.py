"""Gradients reduced to their owners (ZeRO-2)."""
