"""Fully sharded models (ZeRO-3): units whose parameters are gathered before use and freed after it."""
