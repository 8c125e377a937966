"""Launching ranks, sending them a call, and progress bars."""
