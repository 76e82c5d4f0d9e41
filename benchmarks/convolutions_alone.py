"""``python -m benchmarks.convolutions_alone``: single 3x3 convolutions by oneDNN and by loops.

The table has GFLOP/s of PyTorch's kernel and of the loops of ``tvmbridge.schedules.convolutions``,
called in turns, by the lower quartile of the times. GFLOP/s counts the operations of the direct
convolution; the loops need two thirds of them. The last column is the root-mean-square error of the
loops against float64, over the same error of PyTorch's kernel.
"""

from __future__ import annotations

import statistics
import sys

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.common import in_turns, parser
from tvmbridge.kernels.convolution_form import ConvolutionResult, SameConvolution
from tvmbridge.kernels.convolution_loops import usual
from tvmbridge.schedules.alone import convolution

# Batch, channels, filters, height and width, from the U-Net and the ResNet-18 of ``suites``.
SIZES = (
    (2, 32, 32, 96, 96),
    (2, 64, 32, 96, 96),
    (2, 64, 64, 48, 48),
    (2, 128, 128, 24, 24),
    (2, 256, 256, 12, 12),
    (4, 64, 64, 56, 56),
    (4, 256, 256, 14, 14),
    (4, 512, 512, 7, 7),
)
_ROUNDS = 60


def measure(form: SameConvolution) -> tuple[list[float], float]:
    """Return the FLOP/s of PyTorch's kernel and of the loops, and the ratio of their errors."""
    operands = [torch.rand(shape) - 0.5 for shape in form.shapes[:-1]]
    loops, out = convolution(form), torch.empty(form.shapes[-1])
    assert loops is not None
    times = in_turns([lambda: usual(form, operands), lambda: loops(*operands, out)], rounds=_ROUNDS)
    exact = usual(form, [t.double() for t in operands])
    errors = [(r.double() - exact).square().mean().sqrt() for r in (out, usual(form, operands))]
    speeds = [2 * form.work / statistics.quantiles(t, n=4)[0] for t in times]
    return speeds, float(errors[0] / errors[1])


def main() -> int:
    parser(__doc__).parse_args()
    title = f"3x3 convolutions, {torch.get_num_threads()} threads, 10⁹ operations/s"
    table = Table(title=title)
    for column in ("data, filters", "computed", "oneDNN", "loops", "error over oneDNN's"):
        table.add_column(column)
    with torch.no_grad():
        for batch, *sizes, height, width in SIZES:
            for part in ConvolutionResult:
                form = SameConvolution(part, batch, sizes[0], sizes[1], height, width)
                speeds, error = measure(form)
                name = f"{batch}x{sizes[0]}x{height}x{width}, {sizes[1]}"
                table.add_row(name, part.value, *(f"{s / 1e9:.0f}" for s in speeds), f"{error:.2f}")
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
