"""Seconds to the first result of a model that is already built, each in a new process.

- torch.compile: with empty caches, and in a second process.
- cold: tvmbridge with empty caches.
- cached: in a second process, which finds the first one's code on disk.
- bundled: with a cache that was filled from an exported bundle of the first process's cache.

``--device cuda`` measures on a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.common import Row, caches_in, parser, report
from tvmbridge.core.compiled_half import build_halves

# Bounds in seconds of cached and bundled starts; the bound of a cold start is torch.compile's time.
CASES = {
    "BertLayer inference": 0.5,
    "BertLayer training": None,
    "BERT-base inference": 2.0,
    "BERT-base training": 4.0,
}


def _seconds_here(case: str, door: str, device: str) -> float:
    """Return the seconds to the first result in this process.

    ``door`` is ``"tvmbridge"`` or ``"torch.compile"``.
    """
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
    """Return ``x`` on the device as an autograd leaf."""
    return x.detach().to(device).requires_grad_(x.requires_grad)


def _seconds(case: str, door: str, caches: str, device: str) -> float:
    """Return the seconds to the first result of a new process, with caches in ``caches``."""
    arguments = ["benchmarks.first_result", "--here", case, door, "--device", device]
    return float(_python(arguments, caches).split()[-1])


def _python(arguments: Sequence[str], caches: str) -> str:
    """Run ``python -m`` with caches in ``caches``, and return its standard output."""
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(
        command, env={**os.environ, **caches_in(caches)}, capture_output=True, text=True, check=True
    )
    return done.stdout


def _carried(caches: str) -> str:
    """Export the cache of a folder as a bundle, import it elsewhere, and return that folder."""
    bundle, other = f"{caches}/bundle", f"{caches}/other"
    _python(["tvmbridge", "cache", "--export", bundle], caches)
    _python(["tvmbridge", "cache", "--import", bundle], other)
    return other


def main(argv: Sequence[str] = ()) -> int:
    """Measure the chosen cases, or all."""
    options = parser(__doc__)
    options.add_argument("--here", nargs=2, metavar=("CASE", "DOOR"), help="in this process alone")
    options.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options.add_argument("--rows", nargs="+", choices=CASES, default=list(CASES))
    chosen = options.parse_args(list(argv))
    if chosen.here:
        print(_seconds_here(*chosen.here, chosen.device))
        return 0
    rows = []
    build_halves()  # An installation has them; a folder of caches that is new would not.
    for case in chosen.rows:
        with tempfile.TemporaryDirectory() as caches:
            compiled = _seconds(case, "torch.compile", caches, chosen.device)
            again = _seconds(case, "torch.compile", caches, chosen.device)
            cold = _seconds(case, "tvmbridge", caches, chosen.device)
            warm = _seconds(case, "tvmbridge", caches, chosen.device)
            bundled = _seconds(case, "tvmbridge", _carried(caches), chosen.device)
        rows += [
            Row(f"{case}: torch.compile", compiled, "s"),
            Row(f"{case}: torch.compile, cached", again, "s"),
            Row(f"{case}: cold", cold, "s", compiled),
            Row(f"{case}: cached", warm, "s", CASES[case]),
            Row(f"{case}: bundled", bundled, "s", CASES[case]),
        ]
    return report("The first result", rows, check=not chosen.no_check)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
