"""Seconds of add_tvm_dispatch for a BertLayer in train mode, by stage, without import times."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import torch
from torch import nn

from benchmarks.common import Row, parser, report
from tests.end_to_end.steps import base_layer
from tvmbridge import add_tvm_dispatch, dispatch_report

BOUND = 15.0


def main(argv: Sequence[str] = ()) -> int:
    """Compile once, and print the seconds of each stage."""
    options = parser(__doc__)
    options.add_argument("--attention", default="sdpa")
    chosen = options.parse_args(list(argv))
    add_tvm_dispatch(nn.Linear(4, 4), torch.randn(2, 4))
    layer, hidden = base_layer(chosen.attention), torch.randn(2, 128, 768, requires_grad=True)
    start = time.perf_counter()
    add_tvm_dispatch(layer, hidden)
    total = time.perf_counter() - start
    stages = dispatch_report(layer).specializations[0].seconds
    rows = [Row(stage, seconds, "s") for stage, seconds in stages.items()]
    rows.append(Row("add_tvm_dispatch", total, "s", BOUND))
    return report("BertLayer 2x128, train mode", rows, check=not chosen.no_check)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
