"""Symbolic sizes: compile at a few sizes and generalise the results to code for any size."""
