"""Train a BertLayer under autocast to bfloat16: casts and time, against eager PyTorch.

The profiler counts the casts. In eager PyTorch a cast is a call of ``aten::_to_copy``; in compiled
code it is a kernel that only casts. Casts fused into other kernels cause no memory traffic of their
own, so they are counted separately.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

import tvmbridge
from benchmarks.common import Row, alternate, parser, report
from tests.end_to_end.steps import base_layer

_CAST = re.compile(r"cast\d*_kernel" if torch.cuda.is_available() else r"cast\d*")
_MOST_CASTS = 0.5
_MOST_TIME = {"cpu": 0.9, "cuda": 0.6}


def step_of(call: Callable[[torch.Tensor], Any], x: torch.Tensor) -> Callable[[], object]:
    """Return a function that runs forward under autocast, and backward outside of it."""

    def step() -> None:
        with torch.autocast(x.device.type, torch.bfloat16):
            y = call(x)
        y = y[0] if isinstance(y, tuple) else y
        y.backward(torch.ones_like(y))
        if x.is_cuda:
            torch.cuda.synchronize()

    return step


def kernels(step: Callable[[], object]) -> list[str]:
    """Return the names of all profiler events of a step."""
    with torch.profiler.profile() as recorded:
        step()
    return [event.name for event in recorded.events()]


def casts(names: Sequence[str]) -> int:
    """Count the events that only cast: PyTorch's operator, or kernels of compiled code."""
    return sum(name == "aten::_to_copy" or _CAST.fullmatch(name) is not None for name in names)


def fused_casts(names: Sequence[str]) -> int:
    """Count the casts inside fused kernels of compiled code."""
    return sum(
        len(_CAST.findall(name)) for name in names if name.startswith("fused_") and "cast" in name
    )


def main(argv: Sequence[str] = ()) -> int:
    """Count the casts, and time eager PyTorch and compiled code in turns."""
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=20)
    options.add_argument("--batch", type=int, default=8)
    options.add_argument("--length", type=int, default=128)
    options.add_argument("--device", choices=sorted(_MOST_TIME), default="cpu")
    options.add_argument("--threads", type=int, default=2, help="threads of PyTorch")
    chosen = options.parse_args(list(argv))
    torch.set_num_threads(chosen.threads)
    layer = base_layer("sdpa").to(chosen.device)
    x = torch.randn(chosen.batch, chosen.length, 768, device=chosen.device, requires_grad=True)
    steps = [step_of(c, x) for c in (layer, tvmbridge.compile(copy.deepcopy(layer)))]
    for step in steps * 2:
        step()
    assert tvmbridge.compile_report().whole, tvmbridge.compile_report()
    theirs, ours = map(kernels, steps)
    eager, compiled = alternate(steps, rounds=chosen.rounds)
    rows = [
        Row("casts, eager PyTorch", casts(theirs)),
        Row("casts, compiled", casts(ours), "", _MOST_CASTS * casts(theirs)),
        Row("casts within other kernels, compiled", fused_casts(ours)),
        Row("step, eager PyTorch", eager * 1e3, "ms"),
        Row("step, compiled", compiled * 1e3, "ms"),
        Row("step, compiled over eager", compiled / eager, "", _MOST_TIME[chosen.device]),
    ]
    return report("BertLayer under autocast to bfloat16", rows, check=not chosen.no_check)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
