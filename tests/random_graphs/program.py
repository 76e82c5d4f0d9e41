"""A drawn program: leaves, lines of Python over them, and the module that they make."""

from __future__ import annotations

import json
import linecache
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Leaf:
    """A tensor that a program starts from.

    Args:
        name: ``x0`` for an input, ``p0`` for a parameter, ``b0`` for a buffer, ...
        kind: *input*, *parameter* or *buffer*.
        values: *grid* (multiples of a quarter, so that ties are exact), *normal*, *special* (with
            NaN and infinities), *mask*, or *index* (0 and 1).
        tied: the parameter of which this is another name.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    values: str
    requires_grad: bool = False
    tied: str = ""

    def tensor(self, seed: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Its values for a seed; floating ones as ``dtype`` if it is given."""
        generator = torch.Generator().manual_seed(zlib.crc32(self.name.encode()) + seed)

        def integers(low: int, high: int) -> torch.Tensor:
            return torch.randint(low, high, self.shape, generator=generator)

        if self.values == "mask":
            return integers(0, 2).bool()
        if self.values == "index":
            return integers(0, 2)
        if self.values == "grid":
            numbers = integers(-8, 9).double() / 4
        else:
            # Exact in float32 too, so that a program means the same in both.
            numbers = torch.randn(self.shape, generator=generator).double()
        if self.values == "special":
            place = integers(0, 12)
            for at, value in enumerate((float("nan"), float("inf"), -float("inf"), 0.0, -0.0)):
                numbers = torch.where(place == at, value, numbers)
        return numbers.to(dtype or getattr(torch, self.dtype))


@dataclass(frozen=True)
class Program:
    """What :func:`~tests.random_graphs.strategy.programs` draws.

    ``lines`` are the statements of forward, ``returned`` is the expression of its result;
    ``options`` are compile options.
    """

    dtype: str
    leaves: tuple[Leaf, ...]
    lines: tuple[str, ...]
    returned: str
    options: tuple[tuple[str, str], ...] = ()

    @property
    def arguments(self) -> tuple[Leaf, ...]:
        """The leaves that are inputs."""
        return tuple(leaf for leaf in self.leaves if leaf.kind == "input")

    def source(self) -> str:
        """The text of forward."""
        names = ", ".join(["self", *(leaf.name for leaf in self.arguments)])
        lines = [line for text in self.lines for line in text.split("\n")]
        body = [f"    {line}" for line in [*lines, f"return {self.returned}"]]
        return "\n".join([f"def forward({names}):", *body]) + "\n"

    def build(self, dtype: torch.dtype | None = None) -> Drawn:
        """The module, with the same parameters and buffers each time."""
        return Drawn(self, dtype)

    def inputs(self, seed: int = 0, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
        """Arguments for a call; those of seed 0 are the ones that kinks were kept away from."""
        return [
            leaf.tensor(seed, dtype).requires_grad_(leaf.requires_grad) for leaf in self.arguments
        ]

    def to_json(self) -> str:
        """One line of text from which :meth:`from_json` makes the program again."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Program:
        """The program of :meth:`to_json`."""
        content: dict[str, Any] = json.loads(text)
        leaves = tuple(_leaf(leaf) for leaf in content["leaves"])
        options = tuple((name, value) for name, value in content["options"])
        return cls(content["dtype"], leaves, tuple(content["lines"]), content["returned"], options)

    def script(self) -> str:
        """A runnable reproduction."""
        return (
            "from tests.random_graphs.check import check\n"
            "from tests.random_graphs.program import Leaf, Program\n\n"
            f"program = {self!r}\nprint(program.source(), check(program))\n"
        )


def _leaf(content: Mapping[str, Any]) -> Leaf:
    return Leaf(**{**content, "shape": tuple(content["shape"])})


class Drawn(nn.Module):
    """A program as a module."""

    def __init__(self, program: Program, dtype: torch.dtype | None) -> None:
        super().__init__()
        for leaf in program.leaves:
            if leaf.tied:
                setattr(self, leaf.name, getattr(self, leaf.tied))
            elif leaf.kind == "parameter":
                parameter = nn.Parameter(leaf.tensor(0, dtype), requires_grad=leaf.requires_grad)
                self.register_parameter(leaf.name, parameter)
            elif leaf.kind == "buffer":
                self.register_buffer(leaf.name, leaf.tensor(0, dtype))
        source = program.source()
        name = f"<program {zlib.crc32(source.encode()):08x}>"
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        scope: dict[str, Any] = {"torch": torch, "F": F}
        exec(compile(source, name, "exec"), scope)
        self._function = scope["forward"]

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self._function(self, *inputs)
