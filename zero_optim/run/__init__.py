"""Around the training: launch ranks, send them a call, show progress on a terminal."""
