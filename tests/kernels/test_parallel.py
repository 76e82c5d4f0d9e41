"""Combined products: the choice follows measured times, and is made once for each shape."""

from __future__ import annotations

import pytest
import torch

from tvmbridge.kernels import parallel, table
from tvmbridge.kernels.parallel import KINDS, Layers, faster, seconds, worthwhile

LAYERS = Layers(rows=6, depth=16, widths=(8, 4, 4), dtype=torch.float32, threads=1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_all_kinds_are_measured(kind: str, dtype: torch.dtype) -> None:
    layers = Layers(6, 16, (8, 4, 4), dtype, 1)
    assert all(0 < s < 10 for s in seconds(layers, kind))
    assert seconds(layers, kind) is seconds(layers, kind)


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ({"forward": (3.0, 2.0), "input": (1.0, 1.0), "weight": (1.0, 2.0)}, True),
        ({"forward": (3.0, 3.1), "input": (1.0, 0.5), "weight": (1.0, 2.0)}, True),
        ({"forward": (3.0, 2.9), "input": (1.0, 1.0), "weight": (1.0, 2.0)}, False),
        ({"forward": (3.0, 4.0), "input": (1.0, 0.5), "weight": (1.0, 0.9)}, False),
    ],
)
def test_the_choice_follows_the_times(
    times: dict[str, tuple[float, float]], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "_tables", {})
    monkeypatch.setattr(parallel, "seconds", lambda layers, kind: times[kind])
    assert worthwhile(LAYERS) is expected
    assert [faster(LAYERS, kind) for kind in KINDS] == [b < a for a, b in times.values()]
