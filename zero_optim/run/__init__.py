"""Around the training: starting ranks, one process session a launch, progress on a terminal."""
