"""Start each row of ``benchmarks.pipeline`` in new processes, with a time limit."""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

from benchmarks.common import Row

# On SIGTERM torchrun ends its processes, which takes a while.
_GRACE_SECONDS = 40


def start_rows(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Run each row in new processes with a time limit; return 1 if a row failed."""
    ranks = options.ranks or max(2, torch.cuda.device_count())
    ended = [_row(name, arguments, ranks, options.limit) for name in options.rows]
    wrong = [name for name, status in zip(options.rows, ended, strict=True) if status]
    if wrong:
        print(f"not as they should be: {', '.join(wrong)}", flush=True)
    return int(bool(wrong) and not options.no_check)


def _row(name: str, arguments: Sequence[str], ranks: int, limit: float) -> int:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        "--nproc-per-node", str(ranks), "-m", "benchmarks.pipeline", *arguments, "--rows", name,
    ]  # fmt: skip
    with subprocess.Popen(command) as process:
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            print(f"{name} is ended: it took more than {limit:g} s", flush=True)
            process.terminate()
            try:
                process.wait(_GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
            return 1


def join() -> None:
    """Initialize the process group: NCCL on this rank's GPU if there are GPUs, otherwise gloo."""
    on_gpus = torch.cuda.is_available()
    if on_gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if on_gpus else "gloo")


def measured(
    name: str,
    measure: Callable[[argparse.Namespace], Iterator[Row]],
    options: argparse.Namespace,
) -> list[Row]:
    """Measure one row, and print each figure at once; a failure gives a figure that is NaN."""
    rows: list[Row] = []
    begun = time.perf_counter()
    try:
        for row in measure(options):
            rows.append(row)
            _tell(f"{row.name}: {row.value:.3g} {row.unit}")
    except Exception:
        print(f"{name} failed on rank {dist.get_rank()}", flush=True)
        traceback.print_exc()
        rows.append(Row(f"{name}: failed", math.nan, bound=0.0))
    _tell(f"{name}: {time.perf_counter() - begun:.0f} s")
    return rows


def _tell(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)
