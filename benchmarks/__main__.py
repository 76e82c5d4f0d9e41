"""``python -m benchmarks``: compare tvmbridge with its alternatives on the CPU.

One process calls all of them in turns and reports medians with their quartiles. The column
``of roofline`` is a lower bound of the time, over tvmbridge's time. The bound follows from the
FLOP and the weight bytes of a call, at the speeds of this machine's fastest matrix product and
fastest copy. The table goes to the terminal, and all figures go to a JSON file.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.common import parser
from benchmarks.peers import (
    FROZEN,
    LIVE,
    OF_LIVE_WEIGHTS,
    OURS,
    PEERS,
    QUICK,
    Call,
    MissingError,
    step_of,
)
from benchmarks.suites import SUITES, Suite
from tvmbridge.core.machine import cpu_model

# Modules that read their whole weight at each call.
_READ_WHOLE = (nn.Linear, nn.Conv2d, nn.ConvTranspose2d)


@dataclass
class Row:
    """The measurements of one suite, by the name of the peer.

    - ``seconds``: median seconds of a call; ``quartiles``: the lower and upper quartile.
    - ``first``: seconds of preparation and first call.
    - ``errors``: relative error against float64, in inference.
    - ``missing``: why a peer was not measured.
    - ``least``: the lower bound of a call's seconds on this machine, for the roofline column.
    """

    name: str
    seconds: dict[str, float] = field(default_factory=dict)
    quartiles: dict[str, tuple[float, float]] = field(default_factory=dict)
    first: dict[str, float] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    least: float = math.nan

    def over_best(self, ours: str) -> float:
        """Return the time of ``ours`` over the time of the best peer.

        With live weights, which may change between calls, only peers with live weights count.
        """
        peers = OF_LIVE_WEIGHTS if ours == LIVE else [p for p in PEERS if p not in OURS]
        others = [self.seconds[p] for p in peers if p in self.seconds]
        return self.seconds.get(ours, math.nan) / min(others, default=math.nan)


@dataclass(frozen=True)
class Machine:
    """The processor, and its measured speeds.

    - ``flops``: FLOP/s of the fastest float32 matrix product.
    - ``bytes``: bytes/s of a copy, read and written bytes together.
    """

    processor: str
    threads: int
    torch: str
    flops: float
    bytes: float

    @classmethod
    def measured(cls) -> Machine:
        """Measure this machine by a large matrix product and a large copy."""
        source, target = torch.rand(2**25), torch.rand(2**25)
        copied = 2 * source.nbytes / _best(lambda: target.copy_(source))
        flops = _flops(torch.float32)
        return cls(cpu_model(), torch.get_num_threads(), torch.__version__, flops, copied)

    def least_seconds(self, suite: Suite) -> float:
        """Return a lower bound of a call's seconds: its arithmetic, or reading its weights."""
        module, x = suite.module(), suite.sample()
        with FlopCounterMode(display=False) as counter:
            step_of(module, x)()
        read = sum(m.weight.nbytes for m in module.modules() if isinstance(m, _READ_WHOLE))
        passes = 3 if suite.train else 1
        flops = self.flops if suite.dtype is torch.float32 else _flops(suite.dtype)
        return max(counter.get_total_flops() / flops, passes * read / self.bytes)


def _flops(dtype: torch.dtype) -> float:
    """Return the FLOP/s of this machine's fastest matrix product."""
    a, b = (torch.rand(1536, 1536, dtype=dtype) for _ in range(2))
    products = [lambda: torch.mm(a, b)]
    if torch.backends.mkldnn.is_available():
        linear = torch.ops.mkldnn._linear_pointwise
        products.append(lambda: linear(a, b, None, "none", [], ""))
    return 2 * 1536**3 / min(map(_best, products))


def _best(call: Call, repeats: int = 10) -> float:
    best = math.inf
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


def measure(name: str, peers: Sequence[str], seconds: float, machine: Machine) -> Row:
    """Measure the suite ``name``: prepare and call each peer, then call all of them in turns.

    Args:
        name: a key of ``SUITES``.
        peers: keys of ``PEERS``.
        seconds: about how many seconds each peer is called for.
        machine: the speeds that the lower bound is computed from.
    """
    suite, row, calls = SUITES[name], Row(name), dict[str, Call]()
    row.least = machine.least_seconds(suite)
    exact = _exact(suite)
    for peer in peers:
        module, x = suite.module(), suite.sample()
        start = time.perf_counter()
        try:
            call = PEERS[peer](module, x)
            found = call()
        except MissingError as reason:
            row.missing[peer] = str(reason)
            continue
        except Exception as error:  # a peer that fails does not stop the others
            row.missing[peer] = f"{type(error).__name__}: {str(error)[:200]}"
            continue
        row.first[peer] = time.perf_counter() - start
        if isinstance(found, torch.Tensor) and exact is not None:
            row.errors[peer] = float((found.double() - exact).norm() / exact.norm())
        calls[peer] = call
    _take_times(row, calls, seconds)
    return row


def _exact(suite: Suite) -> torch.Tensor | None:
    """Return the output in float64; None in training, because dropout is random."""
    if suite.train:
        return None
    x = suite.sample()
    with torch.no_grad():
        found: torch.Tensor = suite.module().double()(x if suite.vocabulary else x.double())
    return found


def _take_times(row: Row, calls: Mapping[str, Call], seconds: float) -> None:
    taken: dict[str, list[float]] = {peer: [] for peer in calls}
    for call in calls.values():
        for _ in range(3):
            call()
    gc.collect()
    started, rounds = time.perf_counter(), 0
    while rounds < 5 or (time.perf_counter() - started < seconds * len(calls) and rounds < 2000):
        rounds += 1
        for peer, call in calls.items():
            start = time.perf_counter()
            call()
            taken[peer].append(time.perf_counter() - start)
    for peer, times in taken.items():
        low, median, high = statistics.quantiles(times, n=4)
        row.seconds[peer], row.quartiles[peer] = median, (low, high)


def table_of(rows: Sequence[Row], peers: Sequence[str]) -> Table:
    """Return a table of milliseconds by peer, and of tvmbridge's ratios with their bounds."""
    table = Table("", *peers, "live / best", "frozen / best", "of roofline", title="milliseconds")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        suite = SUITES[row.name]
        cells = [_milliseconds(row, peer) for peer in peers]
        ratios = [
            _ratio(row.over_best(LIVE), suite.live),
            _ratio(row.over_best(FROZEN), suite.frozen),
        ]
        ours = min((row.seconds[p] for p in OURS if p in row.seconds), default=math.nan)
        table.add_row(row.name, *cells, *ratios, f"{row.least / ours:.0%}")
    return table


def _milliseconds(row: Row, peer: str) -> str:
    if peer not in row.seconds:
        return "-"
    low, high = row.quartiles[peer]
    return f"{row.seconds[peer] * 1e3:.3g} ±{(high - low) / 2 * 1e3:.1g}"


def _ratio(value: float, bound: float | None) -> str:
    if math.isnan(value):
        return "-"
    if bound is None:
        return f"{value:.2f}"
    return f"{value:.2f} [{'green' if value <= bound else 'red'}](<= {bound:g})[/]"


def _holds(row: Row) -> bool:
    suite = SUITES[row.name]
    pairs = ((row.over_best(LIVE), suite.live), (row.over_best(FROZEN), suite.frozen))
    return all(bound is None or not value > bound for value, bound in pairs)


def _options(argv: Sequence[str]) -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--quick", action="store_true", help="a few rows and peers, in minutes")
    options.add_argument("--rows", nargs="+", help="rows whose names begin so, or contain it")
    options.add_argument("--peers", nargs="+", choices=[*PEERS], help="who is measured")
    options.add_argument("--seconds", type=float, default=3.0, help="a peer and row, about")
    options.add_argument("--threads", type=int, help="PyTorch's; its own choice otherwise")
    options.add_argument("--json", type=Path, default=Path("build/benchmarks.json"))
    return options.parse_args(list(argv))


def main(argv: Sequence[str] = ()) -> int:
    """Measure the chosen rows; return 1 if a bound is checked and does not hold."""
    known = _options(argv)
    if known.threads:
        torch.set_num_threads(known.threads)
    names = [n for n, suite in SUITES.items() if suite.quick or not known.quick]
    if known.rows:
        names = [n for n in SUITES if any(part in n for part in known.rows)]
    peers = known.peers or (QUICK if known.quick else tuple(PEERS))
    machine, rows = Machine.measured(), list[Row]()
    for name in names:
        rows.append(measure(name, peers, 0.5 if known.quick else known.seconds, machine))
        print(f"{name}: " + ", ".join(f"{p} {s * 1e3:.3g} ms" for p, s in rows[-1].seconds.items()))
        for peer, why in rows[-1].missing.items():
            print(f"  without {peer}: {why}")
        torch._dynamo.reset()
        gc.collect()
    console = Console()
    if not console.is_terminal:  # a narrow table would wrap its cells
        console = Console(width=200)
    console.print(table_of(rows, peers))
    content = {
        "machine": asdict(machine),
        "python": platform.python_version(),
        "rows": [asdict(row) for row in rows],
    }
    known.json.parent.mkdir(parents=True, exist_ok=True)
    known.json.write_text(json.dumps(content, indent=1))
    return int(not known.no_check and not all(map(_holds, rows)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
