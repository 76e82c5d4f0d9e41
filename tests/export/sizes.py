"""Export models for any size, and compare them with eager PyTorch at random sizes.

``python -m tests.export.sizes bert --count 200``. Sizes are drawn from the bounds that each Dim
declares, and half of them near a bound. A size that the file refuses is counted apart.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tvmbridge_runtime
from torch import nn
from torch.export import Dim

import tvmbridge
from tests.export.models import Decoder, Strided, UNet
from tests.models import bert_model

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Sized:
    """A module for any size.

    - ``build``: makes the module.
    - ``arguments``: makes the arguments of forward for some sizes.
    - ``bounds``: least and greatest size of each symbol, and the step between sizes.
    - ``sample``: the sizes of the sample.
    - ``spec``: makes the argument ``dynamic_shapes`` of the Dims.
    """

    build: Callable[[], nn.Module]
    arguments: Callable[..., tuple[torch.Tensor, ...]]
    bounds: Sequence[tuple[int, int, int]]
    sample: Sizes
    spec: Callable[..., Any]

    def export(self, path: Path) -> nn.Module:
        """Write the file; return the module."""
        torch.manual_seed(0)
        module = self.build().eval()
        dims = [
            step * Dim(f"n{i}", min=-(-least // step), max=most // step)
            if step > 1
            else Dim(f"n{i}", min=least, max=most)
            for i, (least, most, step) in enumerate(self.bounds)
        ]
        sample = self.arguments(*self.sample)
        tvmbridge.export(module, sample, path, dynamic_shapes=self.spec(*dims))
        return module

    def drawn(self, draw: random.Random) -> Sizes:
        """Return random sizes within the bounds."""

        def one(least: int, most: int, step: int) -> int:
            size = draw.randrange(least, most + 1)
            near = draw.choice((least, least + step, most - step, most))
            size = near if draw.random() < 0.5 else size
            return max(least, size // step * step)

        return tuple(one(*bounds) for bounds in self.bounds)


def _bert() -> nn.Module:
    sizes = {"vocab_size": 100, "max_position_embeddings": 256}
    return bert_model(width=128, heads=4, layers=2, return_dict=False, **sizes)


def _tokens(batch: int, length: int) -> tuple[torch.Tensor, ...]:
    """Return tokens, and a mask of texts of different lengths."""
    mask = torch.arange(length) < torch.randint(1, length + 1, (batch, 1))
    return torch.randint(0, 100, (batch, length)), mask.long()


def _image(*sizes: int) -> tuple[torch.Tensor, ...]:
    return (torch.randn(sizes[0], 3, *sizes[1:]),)


def _of_image(*dims: Any) -> Any:
    return {"x": dict(zip((0, 2, 3), dims, strict=True))}


MODELS = {
    "bert": Sized(
        _bert,
        _tokens,
        [(1, 32, 1), (2, 256, 1)],
        (3, 17),
        lambda b, n: {name: {0: b, 1: n} for name in ("input_ids", "attention_mask")},
    ),
    "decoder": Sized(
        Decoder,
        lambda batch, length: (torch.randint(0, 50, (batch, length)),),
        [(1, 48, 1), (2, 64, 1)],
        (4, 9),
        lambda b, n: {"tokens": {0: b, 1: n}},
    ),
    "strided": Sized(
        Strided, _image, [(1, 8, 1), (9, 160, 1), (9, 160, 1)], (2, 32, 40), _of_image
    ),
    "unet": Sized(UNet, _image, [(1, 4, 1), (4, 128, 2), (4, 128, 2)], (2, 16, 32), _of_image),
}


def outcome(module: nn.Module, arguments: tuple[torch.Tensor, ...], path: Path) -> tuple[str, str]:
    """Return ``right``, ``refused`` or ``wrong``, and why."""
    try:
        report = tvmbridge.compare_export(module, arguments, path)
    except tvmbridge_runtime.ArgumentError as error:
        return "refused", str(error)
    return ("right", "") if report.ok else ("wrong", str(report))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 1 if a result is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.export.sizes", description=__doc__)
    parser.add_argument("names", nargs="*", help="models; all of them by default")
    parser.add_argument("--count", type=int, default=200, help="sizes for each model")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    wrong = 0
    for name in options.names or MODELS:
        model, draw, counts = MODELS[name], random.Random(options.seed), Counter[str]()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "model.tvmb")
            module = model.export(path)
            for symbol in tvmbridge_runtime.read_manifest(path)["symbols"]:
                print(f"{name}: {symbol}", flush=True)
            for _ in range(options.count):
                sizes = model.drawn(draw)
                result, reason = outcome(module, model.arguments(*sizes), path)
                counts[result] += 1
                if reason:
                    print(f"{name}, {sizes}: {result}: {reason}", flush=True)
        print(f"{name}: {options.count} sizes: {dict(counts)}", flush=True)
        wrong += counts["wrong"]
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
