"""Find out what an optimizer class tolerates, by running it on small tensors."""
