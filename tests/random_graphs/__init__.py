"""Modules drawn at random, run through TVM and held against eager PyTorch."""
