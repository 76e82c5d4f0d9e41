"""The report of an explanation, as data and as text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rich.table import Table

from tvmbridge.coloring import Recomputation
from tvmbridge.compiler.step_memory import StepMemory
from tvmbridge.core.text_console import text_console
from tvmbridge.core.types import PassRecord, TensorSpec, ValueDescriptor
from tvmbridge.passes.fx.run import lines_of
from tvmbridge.report import residuals_text

_LINES = 3


@dataclass(frozen=True)
class OperatorUse:
    """An ATen operator of the graph.

    - ``count``: the number of its uses.
    - ``sources``: the user's source lines that it comes from; empty if they are unknown.
    - ``reason``: why it is refused; empty if it is not.
    """

    name: str
    count: int
    sources: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class Draw:
    """A random draw that PyTorch makes before each call.

    - ``operator``: the ATen operator that draws.
    - ``purpose``: the use of the numbers, in words.
    - ``spec``: their shape and dtype.
    - ``source``: the user's source line; empty if it is unknown.
    """

    operator: str
    purpose: str
    spec: TensorSpec
    source: str = ""


@dataclass(frozen=True)
class Mutation:
    """A change that forward makes: ``kind`` (buffer, input, argument or attribute) and its name."""

    kind: str
    target: str


@dataclass(frozen=True)
class ExplainReport:
    """The result of :func:`tvmbridge.explain`.

    - ``module``: the class of the module.
    - ``mode``: train or eval, and whether gradients are compiled.
    - ``ok``: whether the module would be compiled. If not, the other fields hold only the findings
      before the failure.
    - ``stage``: the failing stage: ``capture``, ``import``, ``differentiate`` or ``passes``.
    - ``reason``: why the module would keep its own forward.
    - ``source``: the user's source line of the failure; empty if it is unknown.
    - ``native``: the operators that TVM compiles.
    - ``aten_calls``: the operators that stay kernels of PyTorch.
    - ``refused``: the operators that can be neither.
    - ``noise``: the random draws.
    - ``mutations``: the buffers, inputs, arguments and attributes that forward changes.
    - ``joint``: the source of the joint function, ``relax`` or ``aot``; None in inference.
    - ``joint_reason``: why the source is not ``relax``.
    - ``residual_policy``: the policy that chooses the residuals.
    - ``residuals``: the values that forward keeps for backward, the largest first.
    - ``recomputation``: the bytes and the time that are predicted under a memory budget; None
      without one.
    - ``memory``: the memory that a step needs; None if it was not asked for.
    - ``frozen``: numbers, strings and containers that would be constants of the code, by name:
      arguments that are not tensors, and attributes that forward reads. This code serves no calls
      in which they differ.
    - ``packs``: for each group of products that would become one, the names of their weights.
    - ``eager_functions``: functions that would run in eager PyTorch after the compiled code.
    - ``fx_passes``: records of the fx passes of the options.
    """

    module: str
    mode: str
    ok: bool
    stage: str = ""
    reason: str = ""
    source: str = ""
    native: tuple[OperatorUse, ...] = ()
    aten_calls: tuple[OperatorUse, ...] = ()
    refused: tuple[OperatorUse, ...] = ()
    noise: tuple[Draw, ...] = ()
    mutations: tuple[Mutation, ...] = ()
    joint: str | None = None
    joint_reason: str = ""
    residual_policy: str = ""
    residuals: tuple[ValueDescriptor, ...] = ()
    recomputation: Recomputation | None = None
    memory: StepMemory | None = None
    frozen: Mapping[str, str] = field(default_factory=dict)
    packs: tuple[tuple[str, ...], ...] = ()
    eager_functions: tuple[str, ...] = ()
    fx_passes: tuple[PassRecord, ...] = ()

    @property
    def residual_bytes(self) -> int:
        """The bytes that forward would keep for backward."""
        return sum(r.spec.nbytes for r in self.residuals)

    @property
    def combined_products(self) -> int:
        """The number of products that would be combined with others into one product."""
        return sum(len(names) for names in self.packs)

    def __str__(self) -> str:
        console = text_console()

        def say(text: str) -> None:
            console.print(text, markup=False)

        say(f"{self.module} ({self.mode}): {'whole, one graph' if self.ok else 'its own forward'}")
        if not self.ok:
            say(f"  refused at {self.stage}: {self.reason}")
            if self.source and self.source not in self.reason:
                say(f"  at {self.source}")
        if self.native or self.aten_calls or self.refused:
            console.print(_operators(self))
        for line in self._lines():
            say(line)
        return console.file.getvalue()

    def _lines(self) -> list[str]:
        """Return all findings but the table of operators, as lines of text."""
        lines = []
        for draw in self.noise:
            at = f", {draw.source}" if draw.source else ""
            lines.append(f"draws {draw.spec} for {draw.purpose} by {draw.operator}{at}")
        lines += [f"writes its {m.kind} {m.target}" for m in self.mutations]
        if self.joint is not None:
            why = f", because {self.joint_reason}" if self.joint_reason else ""
            lines.append(f"gradient by {self.joint}{why}")
            lines.append(f"{residuals_text(self.residuals)}, by {self.residual_policy}")
        if self.recomputation is not None:
            lines.append(str(self.recomputation))
        if self.memory is not None:
            lines.append(str(self.memory))
        for record in self.fx_passes:
            lines += lines_of(record)
        lines += [f"one product of {len(names)}: {', '.join(names)}" for names in self.packs]
        if self.eager_functions:
            lines.append(f"runs eagerly after the compiled code: {', '.join(self.eager_functions)}")
        if self.frozen:
            held = ", ".join(f"{name} = {value}" for name, value in self.frozen.items())
            lines.append(f"frozen: {held}")
        return lines


def _operators(report: ExplainReport) -> Table:
    table = Table("operator", "becomes", "uses", "from")
    rows = [
        ("refused", report.refused),
        ("ATen call", report.aten_calls),
        ("native", report.native),
    ]
    for kind, operators in rows:
        for operator in operators:
            # Native operators need no source lines: they are compiled as well as possible.
            lines = () if kind == "native" else operator.sources
            shown = [*lines[:_LINES], *([f"{len(lines) - _LINES} more"] * (len(lines) > _LINES))]
            if operator.reason:
                shown.append(operator.reason)
            table.add_row(operator.name, kind, str(operator.count), _plain("\n".join(shown)))
    return table


def _plain(text: str) -> str:
    """Escape the brackets in ``text`` that rich would interpret as markup."""
    return text.replace("[", r"\[")
