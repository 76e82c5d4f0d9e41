"""The demo: a trained BERT embeds and learns through TVM, beside PyTorch.

``python -m tvmbridge demo`` compares the two in one run; see :mod:`tvmbridge.demo.command`.
"""

from tvmbridge.demo.command import main

__all__ = ["main"]
