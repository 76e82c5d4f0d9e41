"""CPU seconds of add_tvm_dispatch for modules of many equal layers, without the cache.

Each module is compiled in its own process. ``--rows norms-train`` chooses some rows.
``--layers 250`` compiles fewer layers, to see how the time grows.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn

from benchmarks.common import Row, parser, report
from benchmarks.compile_scaling import TOTAL, compile_here, in_a_new_process
from tvmbridge import CompileOptions


def linears(layers: int) -> tuple[nn.Module, Tensor]:
    """Return alternating linear layers and tanh, and an input."""
    pairs = ((nn.Linear(8, 8), nn.Tanh()) for _ in range(layers // 2))
    return nn.Sequential(*(layer for pair in pairs for layer in pair)), torch.randn(4, 8)


def norms(layers: int) -> tuple[nn.Module, Tensor]:
    """Return a chain of layer norms, and an input."""
    return nn.Sequential(*(nn.LayerNorm(8) for _ in range(layers))), torch.randn(4, 8)


def convolutions(layers: int) -> tuple[nn.Module, Tensor]:
    """Return blocks of convolution, batch norm and ReLU, and an input.

    A block has seven parameters and buffers.
    """
    blocks = (
        nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(layers)
    )
    return nn.Sequential(*blocks), torch.randn(2, 4, 8, 8)


@dataclass(frozen=True)
class Case:
    """A module of many equal layers.

    - ``make``: builds the module of a given number of layers, and an input.
    - ``layers``: the default number of layers.
    - ``training``: whether the module is compiled for training.
    - ``bound``: upper bound of the CPU seconds.
    """

    make: Callable[[int], tuple[nn.Module, Tensor]]
    layers: int
    training: bool
    bound: float


CASES: Mapping[str, Case] = MappingProxyType(
    {
        "linears-eval": Case(linears, 1000, training=False, bound=25),
        "linears-train": Case(linears, 1000, training=True, bound=25),
        "norms-eval": Case(norms, 1000, training=False, bound=25),
        "norms-train": Case(norms, 1000, training=True, bound=25),
        "convolutions-eval": Case(convolutions, 286, training=False, bound=30),
    }
)


def measure(name: str, layers: int) -> dict[str, float]:
    """Compile in a new process, without the cache; return the CPU seconds of each stage."""
    arguments = "--rows", name, "--layers", str(layers)
    return in_a_new_process("compile_layers", *arguments)


def rows(name: str, layers: int | None) -> list[Row]:
    """Return the seconds of each stage; the total has a bound if ``layers`` is the default."""
    case = CASES[name]
    count = layers or case.layers
    return [
        Row(
            f"{name}, {count} layers, {stage}",
            seconds,
            "s",
            case.bound if stage == TOTAL and count == case.layers else None,
        )
        for stage, seconds in measure(name, count).items()
    ]


def main(argv: Sequence[str] = ()) -> int:
    """Measure the chosen rows, or all."""
    options = parser(__doc__)
    options.add_argument("--rows", nargs="+", choices=CASES, default=list(CASES))
    options.add_argument("--layers", type=int, help="instead of each row's own number")
    options.add_argument("--worker", action="store_true", help="compile here and print JSON")
    chosen = options.parse_args(list(argv))
    if chosen.worker:
        case = CASES[chosen.rows[0]]
        layers, uncached = chosen.layers or case.layers, CompileOptions(cache=False)
        print(json.dumps(compile_here(case.make, layers, case.training, uncached)))
        return 0
    table = [row for name in chosen.rows for row in rows(name, chosen.layers)]
    return report("CPU time of add_tvm_dispatch", table, check=not chosen.no_check)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
