"""Combined matrix products against separate ones, in a BertLayer of BERT-base; medians.

``auto`` is the default: it always combines in inference. In training it combines if a measurement
of these shapes found the combined product faster.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence

import torch

from benchmarks.common import Row, alternate, parser, report
from benchmarks.speed import inference, training
from tests.end_to_end.steps import base_layer
from tvmbridge import add_tvm_dispatch, dispatch_report
from tvmbridge.kernels.parallel import KINDS, Layers, seconds

CHOICES = ("never", "always", "auto")


def measure(attention: str, shape: tuple[int, int], *, train: bool, rounds: int) -> list[Row]:
    """Return milliseconds of a call with three products, with one product, and with ``auto``."""
    base = base_layer(attention).train(train)
    hidden = torch.randn(*shape, 768, requires_grad=train)
    layers = [copy.deepcopy(base) for _ in CHOICES]
    for layer, choice in zip(layers, CHOICES, strict=True):
        add_tvm_dispatch(layer, hidden, options={"combine_matmuls": choice})
    run = training if train else inference
    times = alternate([run(layer, hidden) for layer in layers], rounds=rounds)
    for layer in layers:
        assert not dispatch_report(layer).fallbacks, dispatch_report(layer).fallbacks
    name = f"{'training' if train else 'inference'} {shape[0]}x{shape[1]} {attention}"
    combined = "combines" if dispatch_report(layers[2]).packs else "does not combine"
    return [
        Row(f"{name}: three products", times[0] * 1e3, "ms"),
        Row(f"{name}: one product", times[1] * 1e3, "ms"),
        Row(f"{name}: auto, which {combined}", times[2] * 1e3, "ms"),
        Row(f"{name}: one / three", times[1] / times[0]),
    ]


def products(shape: tuple[int, int]) -> list[Row]:
    """Return milliseconds of the products alone, separate and combined, as ``auto`` times them."""
    layers = Layers(
        shape[0] * shape[1], 768, (768, 768, 768), torch.float32, torch.get_num_threads()
    )
    rows = []
    for kind in KINDS:
        apart, combined = seconds(layers, kind)
        name = f"bare products {shape[0]}x{shape[1]}, {kind}"
        rows.append(Row(f"{name}: apart", apart * 1e3, "ms"))
        rows.append(Row(f"{name}: combined", combined * 1e3, "ms"))
    return rows


def main(argv: Sequence[str] = ()) -> int:
    """Measure the three cases for each implementation of attention."""
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=20, help="timed calls in training")
    options.add_argument("--attention", nargs="+", default=["sdpa"])
    chosen = options.parse_args(list(argv))
    rows = []
    for attention in chosen.attention:
        for shape in ((1, 14), (1, 128)):
            rows += measure(attention, shape, train=False, rounds=10 * chosen.rounds)
        rows += measure(attention, (8, 128), train=True, rounds=chosen.rounds)
    for shape in ((1, 14), (1, 128), (8, 128)):
        rows += products(shape)
    return report("BertLayer, query, key and value", rows, check=not chosen.no_check)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
