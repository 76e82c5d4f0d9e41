"""Passes over PyTorch's fx graphs, each in a file of its own."""
