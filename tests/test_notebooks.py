"""The notebooks run from top to bottom, and their stored outputs contain no machine's details."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import nbformat
import pytest

from tests.notebooks import FOLDER, METADATA, NOTEBOOKS, execute, read

pytestmark = pytest.mark.timeout(600)

# Patterns that a stored output must not have: paths, users, times of day, progress output.
UNWANTED = {
    "path": r"(?<![\w.<])/(?:home|root|tmp|work|usr|var|private|Users|opt)/",
    "folder of a kernel": r"ipykernel_\d+|site-packages",
    "date": r"\b20\d\d-\d\d-\d\d\b|\b\d\d:\d\d:\d\d\b",
    "warning": r"Warning\b|WARNING|\[W\d+",
    "progress bar": r"\r|━━━━ |it/s\]|%\|",
    "terminal code": "\x1b",
    "address": r"\bat 0x[0-9a-f]{6,}",
}
LARGEST_BYTES = 400_000


@pytest.fixture(scope="module")
def executed(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[nbformat.NotebookNode]]]:
    """Run the notebooks of the selected tests, two at a time; yield their futures by name."""
    names = {
        item.callspec.params["name"]
        for item in request.session.items
        if getattr(item, "originalname", "") == test_runs_in_the_quick_setting.__name__
    }
    with ThreadPoolExecutor(2) as pool:
        yield {n: pool.submit(execute, n, quick=True) for n in NOTEBOOKS if n in names}


# The slowest notebooks: they train, or start processes for tuning tasks or ranks.
LONGEST = (
    "bert_inference_tuning",
    "bert_training",
    "inspect_and_compare",
    "pipeline",
    "recommender_fx",
)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] if n in LONGEST else []) for n in NOTEBOOKS],
)
def test_runs_in_the_quick_setting(
    name: str, executed: dict[str, Future[nbformat.NotebookNode]]
) -> None:
    assert not list(_unwanted(executed[name].result()))


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_stored_outputs(name: str) -> None:
    notebook = read(name)
    nbformat.validate(notebook)
    cells = [c for c in notebook.cells if c.cell_type == "code"]
    assert [c.execution_count for c in cells] == list(range(1, len(cells) + 1))
    kinds = [o.output_type for c in cells for o in c.outputs]
    assert kinds
    assert "error" not in kinds
    pictures = [o for c in cells for o in c.outputs if "image/svg+xml" in o.get("data", {})]
    assert pictures
    assert not list(_unwanted(notebook))
    assert notebook.metadata == METADATA
    assert all(not c.metadata for c in notebook.cells)
    assert (FOLDER / f"{name}.ipynb").stat().st_size < LARGEST_BYTES


def test_every_notebook_is_tested() -> None:
    assert sorted(p.stem for p in FOLDER.glob("*.ipynb")) == sorted(NOTEBOOKS)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("path", "records: /tmp/tmpabc/llvm"),
        ("date", "done at 2026-11-20 10:00:00"),
        ("warning", "FutureWarning: isinstance"),
        ("terminal code", "\x1b[32mrounding"),
        ("address", "<object at 0x7f00aabbccdd>"),
    ],
)
def test_unwanted_is_noticed(what: str, text: str) -> None:
    output = nbformat.v4.new_output("stream", name="stdout", text=text)
    cell = nbformat.v4.new_code_cell("print()", outputs=[output])
    found = list(_unwanted(nbformat.v4.new_notebook(cells=[cell])))
    assert what in [kind for kind, _ in found]


def _unwanted(notebook: nbformat.NotebookNode) -> Iterator[tuple[str, str]]:
    """Yield the kind and the text of each unwanted output, and all output on stderr."""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if output.get("name") == "stderr":
                yield "stderr", output.text
            data = output.get("data", {})
            for text in (output.get("text", ""), *data.values()):
                for what, pattern in UNWANTED.items():
                    if match := re.search(pattern, str(text)):
                        yield what, str(text)[max(0, match.start() - 40) : match.end() + 40]
