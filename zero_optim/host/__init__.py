"""Ranks of one host: memory that they share, and what they send through it."""
