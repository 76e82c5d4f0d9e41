"""Run Relay texts by an interpreter that has a TVM with Relay, and compare with eager PyTorch."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from tvmbridge.relay import RelayText

VARIABLE = "TVMBRIDGE_RELAY_PYTHON"
_WORKER = Path(__file__).with_name("worker.py")


def interpreter() -> str | None:
    """Return the interpreter that has a TVM with Relay; None if the variable names none."""
    return os.environ.get(VARIABLE)


def input_names(written: RelayText) -> list[str]:
    """Return the names of forward's tensors, in order."""
    signature = written.text.split("@main(", 1)[1].split(") ->", 1)[0]
    names = re.findall(r"%(\w+): ", signature)
    return [n for n in names if n not in written.params]


def page_examples() -> list[str]:
    """Return the Python code of the page: writing a text, and running it by Relay."""
    page = Path(__file__).parents[2] / "docs" / "relay.md"
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.S)


def tensors_in(structure: Any) -> list[torch.Tensor]:
    """Return the tensors of nested containers, in order."""
    return [leaf for leaf in pytree.tree_leaves(structure) if isinstance(leaf, torch.Tensor)]


class Relay:
    """A process of that interpreter, which answers requests until it is closed."""

    def __init__(self) -> None:
        command, environment = interpreter(), dict(os.environ)
        if command is None:
            raise RuntimeError(f"set {VARIABLE} to an interpreter with a TVM that has Relay")
        environment.pop("PYTHONPATH", None)
        self._folder = tempfile.TemporaryDirectory()
        self._process = subprocess.Popen(
            [command, str(_WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()

    def check(self, written: RelayText) -> None:
        """Parse the text and infer its types.

        Raises:
            RuntimeError: Relay refuses the text.
        """
        self._ask({"text": self._text(written)})

    def run(
        self, written: RelayText, inputs: Sequence[torch.Tensor], level: int = 3
    ) -> list[np.ndarray[Any, Any]]:
        """Build the text with LLVM, and return the results for ``inputs``.

        Args:
            written: the text and its parameters.
            inputs: forward's tensors, in order.
            level: Relay's optimization level.

        Raises:
            RuntimeError: Relay cannot parse, build or run the text.
        """
        names = input_names(written)
        arrays = {f"param:{n}": a for n, a in written.params.items()}
        for name, tensor in zip(names, inputs, strict=True):
            arrays[f"input:{name}"] = tensor.detach().contiguous().numpy()
        given, results = self._path("arrays.npz"), self._path("results.npz")
        np.savez(given, **arrays)
        request = {"text": self._text(written), "arrays": given, "results": results}
        self._ask({**request, "level": level})
        with np.load(results) as found:
            return [found[f"arr_{i}"] for i in range(len(found.files))]

    def _path(self, name: str) -> str:
        return str(Path(self._folder.name, name))

    def _text(self, written: RelayText) -> str:
        path = self._path("main.relay")
        Path(path).write_text(written.text, encoding="utf-8")
        return path

    def _ask(self, request: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process ended with status {self._process.wait()}")
        answer = json.loads(line)
        if not answer["ok"]:
            raise RuntimeError(answer["error"])


def difference(ours: Sequence[np.ndarray[Any, Any]], theirs: Sequence[torch.Tensor]) -> str | None:
    """Return how Relay's results differ from PyTorch's beyond 1e-5; None if they do not."""
    if len(ours) != len(theirs):
        return f"{len(ours)} results instead of {len(theirs)}"
    for number, (mine, reference) in enumerate(zip(ours, theirs, strict=True)):
        expected = reference.detach().numpy()
        if mine.dtype != expected.dtype or mine.shape != expected.shape:
            return (
                f"result {number}: {mine.dtype}{mine.shape}, not {expected.dtype}{expected.shape}"
            )
        exact = not np.issubdtype(expected.dtype, np.floating)
        tolerance = 0.0 if exact else 1e-5
        same = np.isclose(mine, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
        if not same.all():
            at = tuple(int(i[0]) for i in np.nonzero(~same)) if same.ndim else ()
            return f"result {number}: {mine[at]} instead of {expected[at]} at {at}"
    return None
