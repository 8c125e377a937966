"""Communication: groups as members see them, agreement between ranks, nested values on the wire."""
