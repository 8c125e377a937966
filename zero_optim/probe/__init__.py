"""Probes: small trials that show what an optimizer class tolerates."""
