"""Architectures of the transformers library, run and trained through TVM and compared with eager."""
