"""Exported functions beside ``freeze=True`` and eager PyTorch, in turns in one process.

The bound is on the exported function's time over that of frozen weights in PyTorch. ``--rows``
takes some of the models; ``--threads`` sets the threads of all three.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import Row, alternate, parser, report

_BOUND = 1.1

Made = tuple[Any, Any]


def _bert(length: int) -> Made:
    import torch
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig()), torch.randint(10, 1000, (1, length))


def _vision(name: str) -> Made:
    import torch
    import torchvision  # type: ignore[import-untyped]

    return torchvision.models.get_model(name, weights=None), torch.randn(1, 3, 224, 224)


def _gpt2() -> Made:
    import torch
    from transformers import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    return GPT2Block(GPT2Config(attn_implementation="sdpa")), torch.randn(1, 128, 768)


CASES: dict[str, Callable[[], Made]] = {
    "bert 1x14": lambda: _bert(14),
    "bert 1x128": lambda: _bert(128),
    "resnet50": lambda: _vision("resnet50"),
    "mobilenetv3": lambda: _vision("mobilenet_v3_large"),
    "vit-b": lambda: _vision("vit_b_16"),
    "gpt2 block": _gpt2,
}


def _measured(name: str, threads: int, rounds: int) -> list[Row]:
    import torch
    import tvmbridge_runtime

    import tvmbridge

    torch.manual_seed(0)
    module, x = CASES[name]()
    module.eval()
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        path = tvmbridge.export(module, x, Path(folder, "model.tvmb"))
        exported, given = tvmbridge_runtime.load(path, threads=threads), x.numpy()
        eager = module.forward
        tvmbridge.add_tvm_dispatch(module, x, options={"freeze": True})
        calls = [lambda: exported(given), lambda: module(x), lambda: eager(x)]
        ours, frozen, plain = alternate(calls, rounds=rounds)
    return [
        Row(f"{name}: exported", ours * 1e3, "ms"),
        Row(f"{name}: over frozen", ours / frozen, "times", _BOUND),
        Row(f"{name}: over eager", ours / plain, "times"),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    import torch

    options_of = parser(__doc__)
    options_of.formatter_class = argparse.RawDescriptionHelpFormatter
    options_of.add_argument("--rows", nargs="+", choices=list(CASES), default=list(CASES))
    options_of.add_argument("--threads", type=int, default=torch.get_num_threads())
    options_of.add_argument("--rounds", type=int, default=50)
    options = options_of.parse_args(arguments)
    torch.set_num_threads(options.threads)
    rows: list[Row] = []
    for name in options.rows:
        rows += _measured(name, options.threads, options.rounds)
        report(name, rows[-3:], check=False)
    return report("exported functions", rows, check=not options.no_check)


if __name__ == "__main__":
    sys.exit(main())
