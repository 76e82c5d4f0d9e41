"""Check the tables, and plant one mistake; ``make test-slow`` plants all of them."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from tests.planted.__main__ import main, verdict
from tests.planted.plant import ROOT, Plant
from tests.planted.table import ON_GPUS, PLANTS

QUICK = [plant for plant in PLANTS.values() if plant.quick]


def test_there_are_mistakes_in_every_part() -> None:
    parts = {plant.part for plant in PLANTS.values()}
    assert parts == {"converters", "rules", "passes", "split", "kernels", "runtime", "guard"}
    assert len(PLANTS) >= 18


@pytest.mark.parametrize("plant", [*PLANTS.values(), *ON_GPUS.values()], ids=lambda p: p.name)
def test_what_is_changed_is_there(plant: Plant) -> None:
    changed = plant.changed(plant.path.read_text())
    compile(changed, str(plant.path), "exec")
    files = [argument for argument in plant.tests if argument.startswith("tests/")]
    assert files
    assert all((ROOT / file).exists() for file in files)


def test_a_piece_that_is_not_there_is_an_error() -> None:
    plant = replace(QUICK[0], old="no such text")
    with pytest.raises(ValueError, match="occurs 0 times"):
        plant.changed(plant.path.read_text())


@pytest.mark.slow
def test_a_plant_lives_in_its_process_alone() -> None:
    code = (
        "from tests.planted.table import PLANTS\n"
        f"PLANTS[{QUICK[0].name!r}].install()\n"
        "import importlib\n"
        f"module = importlib.import_module({QUICK[0].module!r})\n"
        "print(module.__loader__.plant.name)\n"
    )
    before = QUICK[0].path.read_bytes()
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == QUICK[0].name, done.stderr
    assert QUICK[0].path.read_bytes() == before


@pytest.mark.slow
def test_one_is_caught() -> None:
    found = verdict(QUICK[0])
    assert found.caught, f"{found.plant.name} is not caught:\n{found.last}"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_are_caught(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--workers", "2"]) == 0, capsys.readouterr().out
