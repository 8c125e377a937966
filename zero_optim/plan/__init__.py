"""Decisions before the first step, from shapes and sizes alone: costs, owners, buckets, layouts."""
