"""Exported functions beside ``freeze=True``, eager PyTorch and other runtimes, in turns.

The bounds are on the exported function's time over that of frozen weights in PyTorch, and over that
of the fastest other runtime: for each model, and as a geometric mean. ``--rows`` takes some of the
models, ``--peers`` some of the runtimes; ``--threads`` sets the threads of all. A runtime that is
not installed, or that cannot run a model, is left out with a note. ``--processor-time`` measures
the processor time of the whole process, which other processes change less, with ``--threads 1``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import Row, alternate, parser, report

_BOUND = 1.1
_BOUND_OF_BEST, _BOUND_OF_MEAN = 1.25, 1.0
_RUNTIMES = ("ONNX Runtime", "OpenVINO", "AOTInductor")

Made = tuple[Any, Any]


def _bert(length: int) -> Made:
    import torch
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(return_dict=False)), torch.randint(10, 1000, (1, length))


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


def _peers(case: str, names: Sequence[str]) -> dict[str, Callable[[], object]]:
    """Return the calls of other runtimes that can run a model, by name."""
    import torch

    from benchmarks.peers import PEERS, MissingError

    found: dict[str, Callable[[], object]] = {}
    for name in names:
        torch.manual_seed(0)
        module, x = CASES[case]()
        try:
            call = PEERS[name](module.eval(), x)
            call()
        except MissingError as error:
            print(f"{case}: {name} is left out: {error}", file=sys.stderr)
        except Exception as error:
            print(f"{case}: {name} fails: {type(error).__name__}: {error}", file=sys.stderr)
        else:
            found[name] = call
    return found


def _measured(name: str, options: argparse.Namespace) -> list[Row]:
    import torch
    import tvmbridge_runtime

    import tvmbridge

    peers = _peers(name, options.peers)
    torch.manual_seed(0)
    module, x = CASES[name]()
    module.eval()
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        path = tvmbridge.export(module, x, Path(folder, "model.tvmb"))
        exported, given = tvmbridge_runtime.load(path, threads=options.threads), x.numpy()
        eager = module.forward
        tvmbridge.add_tvm_dispatch(module, x, options={"freeze": True})
        calls = [lambda: exported(given), lambda: module(x), lambda: eager(x), *peers.values()]
        ours, frozen, plain, *others = alternate(calls, rounds=options.rounds, clock=options.clock)
    rows = [
        Row(f"{name}: exported", ours * 1e3, "ms"),
        Row(f"{name}: over frozen", ours / frozen, "times", _BOUND),
        Row(f"{name}: over eager", ours / plain, "times"),
        *(Row(f"{name}: over {p}", ours / t, "times") for p, t in zip(peers, others, strict=True)),
    ]
    if others:
        best = Row(f"{name}: over the best", ours / min(others), "times", _BOUND_OF_BEST)
        rows.append(best)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    import torch

    options_of = parser(__doc__)
    options_of.formatter_class = argparse.RawDescriptionHelpFormatter
    options_of.add_argument("--rows", nargs="+", choices=list(CASES), default=list(CASES))
    options_of.add_argument("--peers", nargs="*", choices=_RUNTIMES, default=list(_RUNTIMES))
    options_of.add_argument("--threads", type=int, default=torch.get_num_threads())
    options_of.add_argument("--rounds", type=int, default=50)
    options_of.add_argument(
        "--processor-time",
        dest="clock",
        action="store_const",
        const=time.process_time,
        default=time.perf_counter,
    )
    options = options_of.parse_args(arguments)
    torch.set_num_threads(options.threads)
    rows: list[Row] = []
    for name in options.rows:
        found = _measured(name, options)
        rows += found
        report(name, found, check=False)
    best = [row.value for row in rows if row.name.endswith("over the best")]
    if best:
        mean = statistics.geometric_mean(best)
        rows.append(Row("geometric mean over the best", mean, "times", _BOUND_OF_MEAN))
    return report("exported functions", rows, check=not options.no_check)


if __name__ == "__main__":
    sys.exit(main())
