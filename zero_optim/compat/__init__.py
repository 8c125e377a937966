"""What ties the library to PyTorch: its private names, checked at import, and its class of the same name."""
