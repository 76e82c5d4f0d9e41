"""Symbolic sizes: code for any size, generalized from code that is compiled for a few sizes."""
