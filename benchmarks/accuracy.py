"""Accuracy of a BertLayer's training step (BERT-base, 2x128, dropout 0.1) against eager.

The error of the output and of each gradient is the norm of the difference over the norm, with the
same seed. The true gradient of the key's bias is zero, because softmax ignores a shift, so both
sides compute rounding errors. Its error is therefore relative to the gradient of the query's bias.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from benchmarks.common import Row, parser, report
from tests.end_to_end.steps import (
    base_layer,
    dispatched,
    gradient_errors,
    relative_error,
    training_step,
)

BOUNDS = {torch.float32: 1e-5, torch.float64: 1e-12}


def measure(attention: str, dtype: torch.dtype) -> list[Row]:
    """Return the errors of one layer: its output, its worst gradient, and the key's bias."""
    layer = base_layer(attention, dtype)
    hidden = torch.randn(2, 128, 768, dtype=torch.float64).to(dtype)
    reference = training_step(layer, hidden)
    with dispatched(layer, hidden):
        step = training_step(layer, hidden)
    assert torch.equal(step.random_state, reference.random_state), "the generator stands elsewhere"
    errors = gradient_errors(step, reference)
    key = errors.pop("attention.self.key.bias")
    worst = max(errors, key=lambda name: errors[name])
    title = f"{attention} {str(dtype).removeprefix('torch.')}"
    figures = {
        "output": relative_error(step.outputs[0], reference.outputs[0]),
        f"worst of {len(errors)} gradients ({worst})": errors[worst],
        "key.bias, relative to query.bias": key,
    }
    return [Row(f"{title}: {what}", value, "", BOUNDS[dtype]) for what, value in figures.items()]


def main(argv: Sequence[str] = ()) -> int:
    """Measure both implementations of attention in both dtypes."""
    options = parser(__doc__).parse_args(list(argv))
    rows = [row for a in ("eager", "sdpa") for d in BOUNDS for row in measure(a, d)]
    return report("relative error against eager", rows, check=not options.no_check)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
