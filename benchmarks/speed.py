"""Times of a BertLayer of BERT-base through TVM against eager, called in turns; medians.

Training is forward and backward on 8 sentences of 128 tokens with dropout 0.1. Inference is on one
sentence of 14 or 128 tokens.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence

import torch
from torch import nn

from benchmarks.common import Row, alternate, parser, report
from tests.end_to_end.steps import base_layer
from tvmbridge import CompileOptions, add_tvm_dispatch, dispatch_report

TRAINING_BOUND = 1.1
INFERENCE_BOUND = 1.0


def training(layer: nn.Module, hidden: torch.Tensor) -> Callable[[], object]:
    """Return a function that runs forward and backward, with the gradient of the input."""
    cotangent = torch.randn_like(hidden)

    def step() -> None:
        layer.zero_grad(set_to_none=True)
        hidden.grad = None
        layer(hidden).backward(cotangent)

    return step


def inference(layer: nn.Module, hidden: torch.Tensor) -> Callable[[], object]:
    """Return a function that runs forward without gradients."""

    def call() -> None:
        with torch.no_grad():
            layer(hidden)

    return call


def measure(
    attention: str, shape: tuple[int, int], *, train: bool, rounds: int, policy: str
) -> list[Row]:
    """Return the milliseconds of eager PyTorch and of TVM, and their ratio."""
    eager = base_layer(attention).train(train)
    tvm = copy.deepcopy(eager)
    hidden = torch.randn(*shape, 768, requires_grad=train)
    add_tvm_dispatch(tvm, hidden, options={"residual_policy": policy})
    run = training if train else inference
    seconds = alternate([run(layer, hidden) for layer in (eager, tvm)], rounds=rounds)
    assert not dispatch_report(tvm).fallbacks, dispatch_report(tvm).fallbacks
    name = f"{'training' if train else 'inference'} {shape[0]}x{shape[1]} {attention}"
    return [
        Row(f"{name}: eager", seconds[0] * 1e3, "ms"),
        Row(f"{name}: TVM", seconds[1] * 1e3, "ms"),
        Row(
            f"{name}: TVM / eager",
            seconds[1] / seconds[0],
            "",
            TRAINING_BOUND if train else INFERENCE_BOUND,
        ),
    ]


def main(argv: Sequence[str] = ()) -> int:
    """Measure the three cases for each implementation of attention."""
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=20, help="timed calls in training")
    options.add_argument("--attention", nargs="+", default=["eager", "sdpa"])
    options.add_argument(
        "--policy", default=CompileOptions().residual_policy, help="residual policy in training"
    )
    chosen = options.parse_args(list(argv))
    rows = []
    for attention in chosen.attention:
        rows += measure(attention, (8, 128), train=True, rounds=chosen.rounds, policy=chosen.policy)
        for shape in ((1, 14), (1, 128)):
            rows += measure(
                attention, shape, train=False, rounds=10 * chosen.rounds, policy=chosen.policy
            )
    return report("BertLayer, time of a call", rows, check=not chosen.no_check)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
