"""The optimizer's state: brought together from its owners, checked, and dealt out to them."""
