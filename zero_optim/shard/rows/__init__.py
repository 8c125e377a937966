"""Rows that their owner keeps, of parameters that are freed between uses."""
