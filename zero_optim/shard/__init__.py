"""The buckets of a plan, and the gathers that bring their parameters to every rank."""
