"""Symbolic sizes: code for any size, generalised from code for a few."""
