"""Private names and defects of PyTorch."""
