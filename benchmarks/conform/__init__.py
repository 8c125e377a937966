"""What `conformance.py` consists of: classes, loops, systems, ranks, verdicts, the page."""
