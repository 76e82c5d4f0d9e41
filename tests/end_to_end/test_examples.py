"""The scripts in ``examples/``: TVM serves nearly all of their calls, with eager's results."""

from __future__ import annotations

import pytest

from examples.measure import ROWS, Row, measured


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row.name))
def test_a_script_is_served(row: Row) -> None:
    found = measured(row)
    if found.missing:
        pytest.skip(found.missing)
    assert found.results >= 10
    assert found.share >= 0.95, found.reasons
    assert found.difference <= row.bound
    assert found.later == 0
