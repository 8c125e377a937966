"""Around the training: launching ranks, sending them a call, progress on a terminal."""
