"""What ranks tell each other of trouble, and what becomes of it: stamps, the watchdog, its verdicts."""
