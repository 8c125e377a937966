"""What an optimizer class tolerates, found out by running it on small tensors."""
