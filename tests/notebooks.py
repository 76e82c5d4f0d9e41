"""Run the notebooks from top to bottom; ``python -m tests.notebooks --write`` stores outputs."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import nbformat
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = (
    "bert_inference_tuning",
    "bert_training",
    "inspect_and_compare",
    "pipeline",
    "recommender_fx",
)
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


class OwnKernelManager(AsyncKernelManager):
    """A manager that starts kernels with this interpreter, whatever kernel specs are installed."""

    @property
    def kernel_spec(self) -> KernelSpec:
        """Return the spec with the command that starts a kernel."""
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=argv, display_name="Python 3", language="python")


def read(name: str) -> nbformat.NotebookNode:
    """Return the notebook as it is stored."""
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def execute(name: str, *, quick: bool) -> nbformat.NotebookNode:
    """Run all cells of a notebook in a fresh kernel, and return the notebook with its outputs.

    Raises:
        CellExecutionError: a cell failed.
    """
    notebook = read(name)
    client = NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        kernel_manager_class=OwnKernelManager,
        resources={"metadata": {"path": str(FOLDER)}},
        record_timing=False,
        coalesce_streams=True,
    )
    client.execute(env=_environment(quick))
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in notebook.cells:
        cell.metadata = nbformat.NotebookNode()
    return notebook


def _environment(quick: bool) -> dict[str, str]:
    """Return the environment variables of a kernel."""
    inherited = {n: v for n, v in os.environ.items() if n != "TVMBRIDGE_TUNING_LOGS"}
    path = filter(None, [str(FOLDER.parent), os.environ.get("PYTHONPATH")])
    return inherited | {
        "PYTHONPATH": os.pathsep.join(path),
        "TVMBRIDGE_NOTEBOOK_QUICK": "1" if quick else "",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONWARNINGS": "ignore",
    }


def main() -> None:
    """Run the notebooks, and store their outputs if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=NOTEBOOKS, help="default: all")
    parser.add_argument("--write", action="store_true", help="store the outputs in notebooks/")
    parser.add_argument("--quick", action="store_true", help="the setting of the tests")
    options = parser.parse_args()
    for name in options.names:
        start = time.perf_counter()
        notebook = execute(name, quick=options.quick)
        if options.write:
            nbformat.write(notebook, FOLDER / f"{name}.ipynb")
        print(f"{name}: {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
