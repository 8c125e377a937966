"""Mixed precision of the wrappers."""
