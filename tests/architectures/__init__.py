"""Architectures of transformers, run and trained through TVM and compared with eager PyTorch."""
