"""Adapters for training frameworks. Each module imports its framework, so nothing here imports the modules.

Note [Who consolidates]
    Frameworks ask for ``optimizer.state_dict()`` on rank 0 alone (Trainer) or on every rank (Accelerate). One
    rank's part would silently lack the rest, and a collective could wait for ever. So ``state_dict()``
    raises, and each adapter consolidates where its framework has all ranks save. The files are in the format
    of ``torch.optim``.
"""
