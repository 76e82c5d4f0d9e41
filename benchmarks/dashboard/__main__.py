"""``python -m benchmarks.dashboard``: PyTorch's own model suites by tvmbridge and its peers.

Each model runs in its own process, ``--jobs`` of them at once; while one process measures times,
the others are stopped. The file ``--resume`` has a line of JSON for each measured model, which is
not measured again. Each peer is printed when it is done. The table has, for each peer:

- whether the results pass PyTorch's accuracy rule;
- the share of calls after the third that compiled code served;
- eager PyTorch's time over the peer's;
- seconds to the first result with empty caches, and peak memory on a GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.common import caches_in
from benchmarks.dashboard.measure import PEERS, Task
from benchmarks.dashboard.models import SUITES, Entry, entries
from benchmarks.dashboard.turns import Turns
from tvmbridge.core.compiled_half import build_halves

_TINY_BATCH = 2
_USUAL = ("eager", "inductor", "reduce-overhead", "tvmbridge", "tvmbridge-compile")


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--suite", choices=SUITES, default="huggingface")
    options.add_argument("--mode", choices=("inference", "training"), default="inference")
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--scale", choices=("tiny", "full"), default="full")
    options.add_argument("--models", nargs="+", help="names (by default those tried nightly)")
    options.add_argument("--all", action="store_true", help="those of older lists, too")
    options.add_argument("--peers", nargs="+", choices=PEERS, default=list(_USUAL))
    options.add_argument("--batch", type=int, help="in place of the list's")
    options.add_argument(
        "--amp", action=argparse.BooleanOptionalAction, help="autocast to bfloat16"
    )
    options.add_argument("--dtype", help="of parameters: bfloat16 in inference on a GPU")
    options.add_argument("--rounds", type=int, default=20, help="timed calls (0: none)")
    options.add_argument("--jobs", type=int, default=1, help="models at once")
    options.add_argument("--timeout", type=float, default=600.0, help="seconds of a model")
    options.add_argument("--limit", type=float, default=math.inf, help="seconds in all")
    options.add_argument("--resume", type=Path, default=Path("build/dashboard.jsonl"))
    chosen = options.parse_args(list(argv))
    unknown = set(chosen.models or ()) - entries(chosen.suite).keys()
    if unknown:
        options.error(f"the suite {chosen.suite} has no {', '.join(sorted(unknown))}")
    return chosen


def _tasks(chosen: argparse.Namespace) -> Iterator[Task]:
    on_gpu, training = chosen.device == "cuda", chosen.mode == "training"
    known = entries(chosen.suite)
    names = chosen.models or [n for n, e in known.items() if _is_wanted(e, chosen)]
    for name in names:
        entry = known[name]
        listed = entry.batch if on_gpu else entry.cpu_batch or entry.batch
        yield Task(
            suite=chosen.suite,
            name=name,
            mode=chosen.mode,
            device=chosen.device,
            scale=chosen.scale,
            batch=chosen.batch or (_TINY_BATCH if chosen.scale == "tiny" else listed),
            amp=on_gpu and training if chosen.amp is None else chosen.amp,
            dtype=chosen.dtype or ("bfloat16" if on_gpu and not training else "float32"),
            peers=tuple(chosen.peers),
            rounds=chosen.rounds,
            shared=chosen.jobs > 1,
        )


def _is_wanted(entry: Entry, chosen: argparse.Namespace) -> bool:
    on_list = chosen.device == "cuda" or chosen.scale == "tiny" or entry.cpu_batch > 0
    return on_list and (chosen.all or entry.status in ("ci", "own"))


def _measured(
    task: Task,
    turns: Turns,
    deadline: float,
    timeout: float,
    show: Callable[[dict[str, Any]], None],
) -> dict[str, Any] | None:
    """Measure a model in a new process with empty caches; return None if no time was left.

    ``show`` is called with the record each time a peer has been added to it.
    """
    left = min(timeout, deadline - time.monotonic())
    if left <= 0:
        return None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as caches:
        command = [sys.executable, "-m", "benchmarks.dashboard.measure", json.dumps(asdict(task))]
        errors = Path(caches, "errors")
        with errors.open("w", encoding="utf-8") as file:
            process = turns.started(command, env={**os.environ, **caches_in(caches)}, stderr=file)
        start, timer = time.monotonic(), threading.Timer(left, turns.end, [process])
        timer.start()
        try:
            found = _followed(process, turns, {**asdict(task), "results": {}}, show)
        finally:
            timer.cancel()
            turns.end(process)
        if found.pop("done", False):
            return found
        if time.monotonic() - start < left:
            last = (errors.read_text(encoding="utf-8").strip().splitlines() or [""])[-1]
            return {**found, "error": f"status {process.returncode}: {last}"}
    # The deadline of the whole run is no result of this model, so a later run measures it again.
    return {**found, "error": f"not done in {left:.0f} s"} if left == timeout else None


def _followed(
    process: subprocess.Popen[str],
    turns: Turns,
    record: dict[str, Any],
    show: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Return the last record that a process prints, or ``record`` if it prints none."""
    assert process.stdout is not None
    for line in process.stdout:
        try:
            found = json.loads(line)
        except json.JSONDecodeError:
            continue
        if turns.handled(process, found):
            continue
        record = found
        if record.get("done"):
            break
        show(record)
    return record


def _key(record: dict[str, Any]) -> tuple[Any, ...]:
    given = {name: record[name] for name in Task.__dataclass_fields__ if name in record}
    return Task(**{"peers": (), "shared": False, **given}).key


def _read(file: Path) -> dict[tuple[Any, ...], dict[str, Any]]:
    if not file.exists():
        return {}
    records = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    return {_key(record): record for record in records}


def _show(record: dict[str, Any]) -> None:
    """Print the newest peer of a record."""
    if record["results"]:
        peer = list(record["results"])[-1]
        Console(width=1000).print(
            f"{record['name']} {peer}: {_cell(record['results'][peer], None)}"
        )
        sys.stdout.flush()


def _table(records: Sequence[dict[str, Any]], peers: Sequence[str]) -> Table:
    table = Table("model", *peers, title="passed, served, eager's time over it, first result")
    for record in records:
        cells = [_cell(record["results"].get(peer), record.get("error")) for peer in peers]
        table.add_row(record["name"], *cells)
    table.add_section()
    table.add_row("all", *(_total(records, peer) for peer in peers))
    return table


def _cell(found: dict[str, Any] | None, error: str | None) -> str:
    if found is None:
        return (error or "")[:60]
    if found.get("failed"):
        return f"[red]✗[/] {found['failed'][:80]}"
    text = "[green]✓[/]" if found["passed"] else f"[red]✗[/] {found['wrong'][:80]}"
    if "served" in found:
        text += f" {found['served']:.0%}"
    if "seconds" in found:
        text += f" {found['eager'] / found['seconds']:.2f}"
    text += f" {found['first']:.0f} s"
    if "reserved" in found:
        text += f" {found['reserved'] / 2**30:.1f} GiB"
    if found.get("served", 1) < 1 and found.get("reasons"):
        text += f" ({found['reasons'][0][:100]})"
    return text


def _total(records: Sequence[dict[str, Any]], peer: str) -> str:
    ran = [r["results"].get(peer) for r in records]
    found = [f for f in ran if f is not None]
    ratios = [f["eager"] / f["seconds"] for f in found if "seconds" in f]
    text = f"{sum(f['passed'] for f in found)} of {len(found)}"
    served = [f["served"] for f in found if "served" in f]
    if served:
        text += f", {sum(s >= 0.97 for s in served)} served"
    if ratios:
        text += f", mean {statistics.geometric_mean(ratios):.2f}, least {min(ratios):.2f}"
    return text


def main(argv: Sequence[str] = ()) -> int:
    """Measure the models that the file does not have yet, and print the table of all."""
    chosen = _arguments(argv)
    deadline = time.monotonic() + chosen.limit
    chosen.resume.parent.mkdir(parents=True, exist_ok=True)
    known = _read(chosen.resume)
    build_halves()  # An installation has them; the first model would wait for the compiler.
    tasks, turns = list(_tasks(chosen)), Turns()
    with ThreadPoolExecutor(chosen.jobs) as pool:
        running = [
            pool.submit(_measured, task, turns, deadline, chosen.timeout, _show)
            for task in tasks
            if task.key not in known
        ]
        for future in as_completed(running):
            record = future.result()
            if record is None:
                continue
            with chosen.resume.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
            known[_key(record)] = record
            if "error" in record:
                print(f"{record['name']}: {record['error']}", flush=True)
    records = [known[task.key] for task in tasks if task.key in known]
    Console(width=None if sys.stdout.isatty() else 200).print(_table(records, chosen.peers))
    ours = [r["results"].get("tvmbridge") for r in records]
    return int(any(found is not None and not found["passed"] for found in ours))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
