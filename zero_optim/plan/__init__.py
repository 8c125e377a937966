"""Costs, owners, buckets and layouts, decided from shapes before the first step."""
