"""Scripts of many kinds: right on compiled code, and served as much as they must be."""

from __future__ import annotations

import pytest

from tests.scripts.__main__ import in_process, main
from tests.scripts.script import DOORS, SCRIPTS, Script, missing
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


@pytest.mark.parametrize(("names", "status"), [([], 0), (["of_nothing"], 1)])
def test_a_named_script_that_is_not_run_fails(
    names: list[str],
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    absent = Script("of_nothing", lambda door: iter(()), needs=("no_such_library",))
    for name in list(SCRIPTS):
        monkeypatch.delitem(SCRIPTS, name)
    monkeypatch.setitem(SCRIPTS, absent.name, absent)
    assert main(names) == status
    assert "not run: no_such_library" in capsys.readouterr().out


def test_a_name_of_no_script_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["no_such_script"])
    assert "no script has 'no_such_script' in its name" in capsys.readouterr().err
