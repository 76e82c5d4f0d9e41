"""Growth of add_tvm_dispatch's CPU time from modules of n operators to modules of 4n, by stage.

Each module is compiled in its own process. ``--families conv-eval chains-train`` chooses some
kinds of modules, and ``--operators 100`` sets n.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks.common import Row, parser, report
from tvmbridge import CompileOptions, add_tvm_dispatch, dispatch_report

BOUND = 4.5
TOTAL = "in all"


class Chains(nn.Module):
    """``count`` parallel chains tanh(LayerNorm(x_i)) on slices of the input, concatenated."""

    def __init__(self, count: int, width: int = 8) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        slices = x.chunk(len(self.norms), dim=-1)
        chains = zip(self.norms, slices, strict=True)
        return torch.cat([torch.tanh(norm(s)) for norm, s in chains], dim=-1)


def convolutions(operators: int) -> tuple[nn.Module, Tensor]:
    """Return a chain of convolution, batch norm and ReLU, and an input."""
    blocks = (
        nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU())
        for _ in range(operators // 3)
    )
    return nn.Sequential(*blocks), torch.randn(2, 4, 8, 8)


def linears(operators: int) -> tuple[nn.Module, Tensor]:
    """Return a chain of linear layer, layer norm and GELU, and an input."""
    blocks = (
        nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU()) for _ in range(operators // 3)
    )
    return nn.Sequential(*blocks), torch.randn(4, 8)


def chains(operators: int) -> tuple[nn.Module, Tensor]:
    """Return parallel chains of slice, layer norm and tanh, and an input."""
    count = operators // 3
    return Chains(count), torch.randn(4, 8 * count)


def transformer(operators: int) -> tuple[nn.Module, Tensor]:
    """Return a stack of small transformer blocks, about 16 operators each, and an input."""
    blocks = (
        nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        for _ in range(operators // 16)
    )
    return nn.Sequential(*blocks), torch.randn(2, 5, 16)


@dataclass(frozen=True)
class Family:
    """A kind of module: ``make`` builds one of a given number of operators and an input."""

    make: Callable[[int], tuple[nn.Module, Tensor]]
    training: bool


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        f"{name}-{mode}": Family(make, mode == "train")
        for name, make in (
            ("conv", convolutions),
            ("linear", linears),
            ("chains", chains),
            ("transformer", transformer),
        )
        for mode in ("eval", "train")
    }
)


def compile_here(
    make: Callable[[int], tuple[nn.Module, Tensor]],
    count: int,
    training: bool,
    options: CompileOptions | None = None,
) -> dict[str, float]:
    """Compile once in this process; return the CPU seconds of each stage and in total.

    Args:
        make: builds a module of ``count`` operators or layers, and an input.
        count: the size of the module.
        training: whether the module is in train mode.
        options: how it is compiled.
    """
    warm = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).train(training)
    add_tvm_dispatch(warm, torch.randn(2, 4), options=options)
    module, sample = make(count)
    module.train(training)
    # The compiler times its stages by perf_counter, which must return CPU time as well.
    with mock.patch("time.perf_counter", time.process_time):
        start = time.process_time()
        add_tvm_dispatch(module, sample, options=options)
        total = time.process_time() - start
    (entry,) = dispatch_report(module).specializations
    return {**entry.seconds, TOTAL: total}


def in_a_new_process(benchmark: str, *arguments: str) -> dict[str, float]:
    """Run the worker of a benchmark, which prints what :func:`compile_here` returns as JSON."""
    command = [sys.executable, "-m", f"benchmarks.{benchmark}", "--worker", *arguments]
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    seconds: dict[str, float] = json.loads(answer.stdout.splitlines()[-1])
    return seconds


def measure(name: str, operators: int) -> dict[str, float]:
    """Run :func:`compile_here` in a new process and return its result."""
    arguments = "--families", name, "--operators", str(operators)
    return in_a_new_process("compile_scaling", *arguments)


def rows(name: str, operators: int) -> list[Row]:
    """Return the seconds of ``operators`` operators and of four times as many, and the ratio."""
    small, large = measure(name, operators), measure(name, 4 * operators)
    found = []
    for stage, seconds in large.items():
        found += [
            Row(f"{name}, {stage}, {operators} operators", small[stage], "s"),
            Row(f"{name}, {stage}, {4 * operators} operators", seconds, "s"),
        ]
        bound = BOUND if stage == TOTAL else None
        found.append(Row(f"{name}, {stage}, times as long", seconds / small[stage], "", bound))
    return found


def main(argv: Sequence[str] = ()) -> int:
    """Measure the chosen kinds of modules, or all."""
    options = parser(__doc__)
    options.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    options.add_argument("--operators", type=int, default=500, help="of the smaller module")
    options.add_argument("--worker", action="store_true", help="compile here and print JSON")
    chosen = options.parse_args(list(argv))
    if chosen.worker:
        family = FAMILIES[chosen.families[0]]
        print(json.dumps(compile_here(family.make, chosen.operators, family.training)))
        return 0
    table = [row for name in chosen.families for row in rows(name, chosen.operators)]
    return report("CPU time of add_tvm_dispatch", table, check=not chosen.no_check)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
