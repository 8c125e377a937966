"""What the plan leads to: parameters in buckets, and the gathers that bring them to every rank."""
