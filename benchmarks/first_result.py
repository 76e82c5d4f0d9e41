"""Seconds to the first result, each in a process of its own, from a model and its input on.

Cold with empty caches, beside torch.compile with empty caches of its own; cached in a second
process that finds the first one's code on disk; bundled in a process whose cache was empty until it
imported a bundle of the first one's. ``--device cuda`` measures on a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.common import Row, parser, report

# Bounds in seconds of a second process; a first one is bounded by torch.compile.
CASES = {
    "BertLayer inference": 0.5,
    "BertLayer training": None,
    "BERT-base inference": 2.0,
    "BERT-base training": 4.0,
}


def _seconds_here(case: str, door: str, device: str) -> float:
    """Those of the first result in this process."""
    import torch
    from transformers import BertConfig, BertModel

    from tests.end_to_end.steps import base_layer
    from tvmbridge import add_tvm_dispatch

    training = case.endswith("training")
    torch.manual_seed(0)
    if case.startswith("BertLayer"):
        module, x = base_layer("sdpa"), torch.randn(1, 128, 768, requires_grad=training)
    else:
        module, x = BertModel(BertConfig()), torch.randint(10, 1000, (2, 128))
    module, x = module.train(training).to(device), _on(x, device)
    start = time.perf_counter()
    with torch.set_grad_enabled(training):
        if door == "tvmbridge":
            add_tvm_dispatch(module, x)
        else:
            module.compile()
        found = module(x)
        if training:
            found[0].sum().backward()
        if device == "cuda":
            torch.cuda.synchronize()
    return time.perf_counter() - start


def _on(x: Any, device: str) -> Any:
    """``x`` on the device, as a leaf of autograd."""
    return x.detach().to(device).requires_grad_(x.requires_grad)


def _seconds(case: str, door: str, caches: str, device: str) -> float:
    """Those of a new process, whose caches are in a folder."""
    arguments = ["benchmarks.first_result", "--here", case, door, "--device", device]
    return float(_python(arguments, caches).split()[-1])


def _python(arguments: Sequence[str], caches: str) -> str:
    """What a module prints that Python runs with the caches in a folder."""
    folders = {"TVMBRIDGE_CACHE_DIR": f"{caches}/tvm", "TORCHINDUCTOR_CACHE_DIR": f"{caches}/torch"}
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(
        command, env={**os.environ, **folders}, capture_output=True, text=True, check=True
    )
    return done.stdout


def _carried(caches: str) -> str:
    """An empty cache that a bundle of the one in a folder was imported into; its folder."""
    bundle, other = f"{caches}/bundle", f"{caches}/other"
    _python(["tvmbridge", "cache", "--export", bundle], caches)
    _python(["tvmbridge", "cache", "--import", bundle], other)
    return other


def main(argv: Sequence[str] = ()) -> int:
    """Measure each case."""
    options = parser(__doc__)
    options.add_argument("--here", nargs=2, metavar=("CASE", "DOOR"), help="in this process alone")
    options.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options.add_argument("--rows", nargs="+", choices=CASES, default=list(CASES))
    chosen = options.parse_args(list(argv))
    if chosen.here:
        print(_seconds_here(*chosen.here, chosen.device))
        return 0
    rows = []
    for case in chosen.rows:
        with tempfile.TemporaryDirectory() as caches:
            compiled = _seconds(case, "torch.compile", caches, chosen.device)
            cold = _seconds(case, "tvmbridge", caches, chosen.device)
            warm = _seconds(case, "tvmbridge", caches, chosen.device)
            bundled = _seconds(case, "tvmbridge", _carried(caches), chosen.device)
        rows += [
            Row(f"{case}: torch.compile", compiled, "s"),
            Row(f"{case}: cold", cold, "s", compiled),
            Row(f"{case}: cached", warm, "s", CASES[case]),
            Row(f"{case}: bundled", bundled, "s", CASES[case]),
        ]
    return report("The first result", rows, check=not chosen.no_check)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
