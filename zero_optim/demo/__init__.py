"""The job of ``zero-optim train``: a small GPT trained on text with a sharded optimizer."""
