"""A drawn program: tensors (*leaves*), lines of Python that use them, and the resulting module."""

from __future__ import annotations

import ast
import copy
import json
import linecache
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.device import DEVICE
from tests.random_graphs import functions

# The globals of a program's text.
NAMES: dict[str, Any] = {
    "torch": torch,
    "F": F,
    "nn": nn,
    "checkpoint": checkpoint,
    "copy": copy,
    "functions": functions,
}


@dataclass(frozen=True)
class Leaf:
    """A tensor that a program starts from: an input, a parameter or a buffer.

    Args:
        name: ``x0`` for an input, ``p0`` for a parameter, ``b0`` for a buffer, ...
        kind: *input*, *parameter* or *buffer*.
        shape: the tensor's shape.
        dtype: the name of its dtype, such as ``float64``.
        values: *grid* (multiples of a quarter, so that ties are exact), *normal*, *special* (with
            NaN and infinities), *mask* (booleans), *index* or *count* (integers 0 and 1). *number*
            and *list* are inputs that are no tensors: the call gives their values.
        requires_grad: whether the tensor requires a gradient.
        tied: the parameter that this leaf is another name of; empty if none.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    values: str
    requires_grad: bool = False
    tied: str = ""

    @property
    def is_tensor(self) -> bool:
        """Whether the leaf is a tensor, and not a number or a list."""
        return self.values not in ("number", "list")

    def tensor(self, seed: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the tensor for a seed, with floating values in ``dtype`` if it is given."""
        generator = torch.Generator().manual_seed(zlib.crc32(self.name.encode()) + seed)

        def integers(low: int, high: int) -> torch.Tensor:
            return torch.randint(low, high, self.shape, generator=generator)

        if self.values == "mask":
            return integers(0, 2).bool().to(DEVICE)
        if self.values in ("index", "count"):
            return integers(0, 2).to(DEVICE)
        if self.values == "grid":
            numbers = integers(-8, 9).double() / 4
        else:
            # Drawn in float32, so that a program has the same values in float32 and in float64.
            numbers = torch.randn(self.shape, generator=generator).double()
        if self.values == "special":
            place = integers(0, 12)
            for at, value in enumerate((float("nan"), float("inf"), -float("inf"), 0.0, -0.0)):
                numbers = torch.where(place == at, value, numbers)
        return numbers.to(dtype or getattr(torch, self.dtype)).to(DEVICE)


@dataclass(frozen=True)
class Call:
    """One of a module's calls, with the statements that run before and after its forward.

    Args:
        arguments: an expression for each argument, over the tensors of the inputs' leaves.
        before: statements about ``module`` that run before the call.
        after: statements that run between forward and backward, with the names ``module``,
            ``given`` (the tensors among the arguments) and ``made`` (those among the results).
        seed: the seed of the inputs' values.
        training: whether the module is in train mode.
        gradients: the autograd mode: *grad*, *no_grad* or *inference*.
        used: positions of the results that backward starts from; None for all results.
        dispatched: whether ``add_tvm_dispatch`` is called with such arguments before the call.
        twice: whether forward runs twice, with one backward for both.
    """

    arguments: tuple[str, ...]
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    seed: int = 0
    training: bool = True
    gradients: str = "grad"
    used: tuple[int, ...] | None = None
    dispatched: bool = False
    twice: bool = False

    def given(self, leaves: Mapping[str, torch.Tensor]) -> list[Any]:
        """Return the arguments, computed from the tensors of ``leaves``."""
        with torch.enable_grad():
            return [eval(text, {**NAMES, **leaves}) for text in self.arguments]


@dataclass(frozen=True)
class Program:
    """A random module as text.

    :func:`~tests.random_graphs.strategy.programs` and
    :func:`~tests.random_graphs.modules.modules` draw programs.

    - ``dtype``: the least precise floating dtype of the program's values.
    - ``leaves``: inputs, parameters and buffers.
    - ``lines``: the statements of forward.
    - ``returned``: the expression that forward returns.
    - ``options``: compile options.
    - ``submodules``: names and expressions of submodules.
    - ``attributes``: names and literals of attributes that are no tensors.
    - ``calls``: the calls that a check makes in order; empty for one call in each mode.
    """

    dtype: str
    leaves: tuple[Leaf, ...]
    lines: tuple[str, ...]
    returned: str
    options: tuple[tuple[str, str], ...] = ()
    submodules: tuple[tuple[str, str], ...] = ()
    attributes: tuple[tuple[str, str], ...] = ()
    calls: tuple[Call, ...] = ()

    @property
    def arguments(self) -> tuple[Leaf, ...]:
        """Return the leaves that are inputs."""
        return tuple(leaf for leaf in self.leaves if leaf.kind == "input")

    def source(self) -> str:
        """Return the source of forward."""
        names = ", ".join(["self", *(leaf.name for leaf in self.arguments)])
        lines = [line for text in self.lines for line in text.split("\n")]
        body = [f"    {line}" for line in [*lines, f"return {self.returned}"]]
        return "\n".join([f"def forward({names}):", *body]) + "\n"

    def build(self, dtype: torch.dtype | None = None) -> Drawn:
        """Build the module, with the same parameters and buffers each time."""
        return Drawn(self, dtype)

    def inputs(self, seed: int = 0, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
        """Return arguments for a call; the author kept only seed 0's values away from kinks."""
        return [
            leaf.tensor(seed, dtype).requires_grad_(leaf.requires_grad) for leaf in self.arguments
        ]

    def tensors(self, seed: int) -> dict[str, torch.Tensor]:
        """Return the input leaves' tensors, which the arguments of a call are computed from."""
        chosen = [leaf for leaf in self.arguments if leaf.is_tensor]
        return {x.name: x.tensor(seed).requires_grad_(x.requires_grad) for x in chosen}

    def to_json(self) -> str:
        """Return the program as one line of text for :meth:`from_json`."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Program:
        """Return the program of a text from :meth:`to_json`."""
        content: dict[str, Any] = json.loads(text)
        leaves = tuple(_leaf(leaf) for leaf in content["leaves"])
        named = {
            field: tuple((name, value) for name, value in content[field])
            for field in ("options", "submodules", "attributes")
        }
        calls = tuple(_call(call) for call in content["calls"])
        lines = tuple(content["lines"])
        return cls(content["dtype"], leaves, lines, content["returned"], **named, calls=calls)

    def script(self) -> str:
        """Return a script that checks the program."""
        return (
            "from tests.random_graphs.check import check\n"
            "from tests.random_graphs.program import Call, Leaf, Program\n\n"
            f"program = {self!r}\nprint(program.source(), check(program))\n"
        )


def _leaf(content: Mapping[str, Any]) -> Leaf:
    return Leaf(**{**content, "shape": tuple(content["shape"])})


def _call(content: Mapping[str, Any]) -> Call:
    used = content["used"]
    tuples = {name: tuple(content[name]) for name in ("arguments", "before", "after")}
    return Call(**{**content, **tuples, "used": None if used is None else tuple(used)})


def submodule(owner: nn.Module, name: str, text: str) -> nn.Module:
    """Build a submodule of ``owner``, with the same parameters each time.

    The expression ``text`` may name other submodules as attributes of ``self``, the owner.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(zlib.crc32(name.encode()))
        made: nn.Module = eval(text, {**NAMES, "self": owner})
        return made.to(DEVICE)


class Drawn(nn.Module):
    """The module of a program."""

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
        for name, text in program.submodules:
            setattr(self, name, submodule(self, name, text))
        for name, text in program.attributes:
            setattr(self, name, ast.literal_eval(text))
        source = program.source()
        name = f"<program {zlib.crc32(source.encode()):08x}>"
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        scope = dict(NAMES)
        exec(compile(source, name, "exec"), scope)
        self._function = scope["forward"]

    def forward(self, *inputs: Any) -> Any:
        return self._function(self, *inputs)
