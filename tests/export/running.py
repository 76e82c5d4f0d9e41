"""Export one model in a process of its own, which may crash or hang."""

from __future__ import annotations

import tempfile
import time
import traceback
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.export.suites import make
from tests.processes import Died, run_alone


def check(suite: str, name: str) -> dict[str, Any]:
    """Export one model and compare it; return its row."""
    import torch

    import tvmbridge

    module, sample = make(suite, name)
    start = time.perf_counter()
    row = {"suite": suite, "name": name, "result": "agrees", "reason": ""}
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.tvmb")
        try:
            tvmbridge.export(module, (), path, sample_kwargs=sample)
            row["seconds"] = round(time.perf_counter() - start, 1)  # type: ignore[assignment]
            row["megabytes"] = round(_code_size(path) / 1e6, 1)  # type: ignore[assignment]
            report = tvmbridge.compare_export(module, (), path, sample_kwargs=sample)
            if not report.ok:
                row |= {"result": "wrong", "reason": str(report)}
        except tvmbridge.BridgeError as error:
            row |= {"result": "refused", "reason": f"{type(error).__name__}: {error}"}
    return row


def _code_size(path: Path) -> int:
    import tvmbridge_runtime

    return int(tvmbridge_runtime.read_manifest(path)["sections"]["code"]["size"])


def _work(suite: str, name: str, connection: Connection) -> None:
    import torch

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    try:
        row = check(suite, name)
    except Exception as error:
        told = traceback.format_exception(error)[-4:]
        row = {"suite": suite, "name": name, "result": "error", "reason": "".join(told)[-1500:]}
    connection.send(row)


def checked_alone(context: Any, suite: str, name: str, limit: float) -> dict[str, Any]:
    """Return the row of a model that runs in a process of its own."""
    try:
        row: dict[str, Any] = run_alone(context, _work, (suite, name), limit)
        return row
    except Died as death:
        return {"suite": suite, "name": name, "result": death.result, "reason": str(death)}
