"""The plan carried out: parameters in buckets, and the gathers that bring them to every rank."""
