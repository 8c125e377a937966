"""Private names of PyTorch, checked at import, and the relation to PyTorch's class of the same name."""
