"""``python -m benchmarks.products``: single float32 matrix products by libraries and by loops.

The table has GFLOP/s of MKL (``torch.mm``), oneDNN and the loops of
``tvmbridge.schedules.products``, called in turns, by the lower quartile of the times. The last
column is the largest error of the loops against float64, over MKL's largest error.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.common import in_turns, parser
from tvmbridge.kernels.matmul import matmul_spec, onednn_program, program
from tvmbridge.kernels.product_form import Form
from tvmbridge.schedules.alone import multiplication

FORMS = (
    Form(64, 512, 512),
    Form(512, 512, 64, left_transposed=True),
    Form(64, 512, 512, right_transposed=True),
    Form(1024, 768, 3072),
    Form(1024, 768, 768),
    Form(768, 768, 1024, left_transposed=True),
    Form(3072, 768, 1024, left_transposed=True),
    Form(768, 3072, 1024, left_transposed=True),
    Form(10000, 256, 256, left_transposed=True),
    Form(128, 64, 128, batch=48),
    Form(128, 128, 64, right_transposed=True, batch=48),
    Form(32, 32, 32, batch=384),
)
_CANDIDATES = ("MKL", "oneDNN", "loops")
_ROUNDS = 100


def measure(form: Form) -> tuple[list[float], float]:
    """Return the FLOP/s of each candidate, NaN if it cannot run, and the ratio of errors."""
    a, b, out = (torch.rand(shape) - 0.5 for shape in form.shapes)
    (left, right), result = form.operands, form.shapes[2]
    spec = matmul_spec((left[1], right[1]), result)
    library, loops = program(spec), multiplication(form)
    mine = torch.empty_like(out)
    runs: dict[str, Callable[[], object]] = {"MKL": lambda: library(a, b, out)}
    if form.batch is None and torch.backends.mkldnn.is_available():
        onednn = onednn_program(spec)
        runs["oneDNN"] = lambda: onednn(a, b)
    if loops is not None:
        runs["loops"] = lambda: loops(a, b, mine)
    times = in_turns(list(runs.values()), rounds=_ROUNDS)
    lower = {n: statistics.quantiles(t, n=4)[0] for n, t in zip(runs, times, strict=True)}
    matrices = [t.mT if o[1] else t for t, o in ((a, left), (b, right))]
    exact = matrices[0].double() @ matrices[1].double()
    errors = [float((r.double() - exact).abs().max()) for r in (mine, out)]
    speeds = [2 * form.work / lower.get(n, math.nan) for n in _CANDIDATES]
    return speeds, errors[0] / errors[1]


def _name(form: Form) -> str:
    left, right = f"{form.rows}x{form.depth}", f"{form.depth}x{form.columns}"
    batch = "" if form.batch is None else f"{form.batch} of "
    marks = ["ᵀ" if t else "" for t in (form.left_transposed, form.right_transposed)]
    return f"{batch}{left}{marks[0]} by {right}{marks[1]}"


def main() -> int:
    parser(__doc__).parse_args()
    table = Table(title=f"float32 products, {torch.get_num_threads()} threads, 10⁹ operations/s")
    for column in ("product (ᵀ: lies transposed)", *_CANDIDATES, "error over MKL's"):
        table.add_column(column)
    with torch.no_grad():
        for form in FORMS:
            speeds, error = measure(form)
            table.add_row(_name(form), *(f"{s / 1e9:.0f}" for s in speeds), f"{error:.1f}")
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
