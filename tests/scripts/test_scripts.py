"""Scripts of many kinds: right on compiled code, and served as much as they must be."""

from __future__ import annotations

import pytest

from tests.scripts.__main__ import in_process
from tests.scripts.script import DOORS, SCRIPTS, missing
from tests.scripts.table import load

load()


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_right_and_served(name: str, door: str) -> None:
    script = SCRIPTS[name]
    if why := missing(script):
        pytest.skip(why)
    if door not in script.doors:
        pytest.skip("the script takes another door")
    found = in_process(name, door)
    assert found.right(script), found.error or found.difference
    # Graphs of torch.compile have other calls than the module, and limits of its own.
    assert door != "dispatch" or found.share >= script.least, found.reasons
