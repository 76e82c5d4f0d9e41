"""Export the models of suites, run each by the runtime, and compare with eager PyTorch.

``python -m tests.export --suite torchvision timm``. Each model runs in a process of its own and is
one line of JSON in the file ``--out``: suite, name, result, reason, seconds. Models that the file
has already are not run again; ``--retry`` runs those again that do not agree. Several processes may
share the work: ``--shard 0/4 --out build/exported-0.jsonl`` takes every fourth model.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.export.running import checked_alone
from tests.export.suites import SUITES
from tests.processes import add_shard


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.export", description=__doc__)
    parser.add_argument("names", nargs="*", help="models; all of the suites by default")
    parser.add_argument("--suite", nargs="+", choices=list(SUITES), default=list(SUITES))
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for one model")
    parser.add_argument("--workers", type=int, default=1, help="models at a time")
    add_shard(parser)
    parser.add_argument("--retry", action="store_true", help="run again what does not agree")
    parser.add_argument("--out", type=Path, default=Path("build/exported.jsonl"))
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 1 if a model is wrong, crashes, hangs or raises an error."""
    options = _parse(arguments)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "tvm", "tests.export.running"])
    options.out.parent.mkdir(parents=True, exist_ok=True)
    lines = options.out.read_text().splitlines() if options.out.exists() else []
    rows = {(r["suite"], r["name"]): r for r in map(json.loads, lines)}
    chosen = [
        (suite, name)
        for suite in options.suite
        for name in SUITES[suite]()
        if not options.names or name in options.names
    ]
    wanted = [
        key
        for key in chosen[options.shard]
        if key not in rows or (options.retry and rows[key]["result"] != "agrees")
    ]
    with ThreadPoolExecutor(options.workers) as pool:
        for row in pool.map(lambda each: checked_alone(context, *each, options.limit), wanted):
            rows[row["suite"], row["name"]] = row
            print(json.dumps(row), flush=True)
            with options.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
    counts = Counter((row["suite"], row["result"]) for row in rows.values())
    for (suite, result), count in sorted(counts.items()):
        print(f"{suite}: {count} {result}", file=sys.stderr)
    return int(any(row["result"] not in ("agrees", "refused") for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
