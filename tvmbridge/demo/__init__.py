"""The demo: run and fine-tune a trained BERT (MiniLM) in eager PyTorch and through TVM.

``python -m tvmbridge demo`` compares both in one run; see :mod:`tvmbridge.demo.command`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Final

_DESCRIPTION: Final = "MiniLM embeds and is fine-tuned, by PyTorch and through TVM."


def main(argv: Sequence[str] = ()) -> int:
    """Run the demo; return the exit status, 1 if a difference is too large or a call fell back."""
    options = _parser().parse_args(list(argv))
    # Imported after the options are parsed, so that --help does not wait for PyTorch.
    from tvmbridge.demo.command import run

    return run(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tvmbridge demo", description=_DESCRIPTION)
    parser.add_argument("--sentences", type=_positive, default=32, help="sentences to embed")
    parser.add_argument("--rounds", type=_positive, default=15, help="timed calls of each")
    parser.add_argument("--steps", type=_positive, default=20, help="steps of AdamW")
    parser.add_argument("--batch", type=_positive, default=16, help="remarks in a step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--attention", choices=("sdpa", "eager"), default="sdpa")
    parser.add_argument("--out", type=Path, default=Path("build/demo"), metavar="FOLDER")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number


__all__ = ["main"]
