"""Failures told between ranks: stamps, the watchdog, its verdicts."""
