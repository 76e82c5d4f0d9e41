"""``python -m tvmbridge doctor``: check an installation, and say how to repair it."""
