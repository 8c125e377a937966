"""Launching ranks, and sending them a call."""
