"""What an explanation says, as data and as tables."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

from tvmbridge.core.types import PassRecord, TensorSpec, ValueDescriptor
from tvmbridge.passes.fx.run import lines_of
from tvmbridge.report import residuals_text

_LINES = 3


@dataclass(frozen=True)
class OperatorUse:
    """An ATen operator of the graph.

    ``count`` says how often it is used, ``sources`` the user's lines that it comes from (empty
    where they are not known). ``reason`` is set where it is refused.
    """

    name: str
    count: int
    sources: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class Draw:
    """Random numbers that PyTorch draws before each call: the operator, what for, and the line."""

    operator: str
    purpose: str
    spec: TensorSpec
    source: str = ""


@dataclass(frozen=True)
class Mutation:
    """What forward changes: ``kind`` is buffer, input, argument or attribute."""

    kind: str
    target: str


@dataclass(frozen=True)
class ExplainReport:
    """The result of :func:`tvmbridge.explain`.

    ``mode`` is the one that the module stands in. Where it would keep its own forward, ``ok`` is
    False, ``stage`` is where it fails (``capture``, ``import``, ``differentiate`` or ``passes``),
    ``reason`` why, and ``source`` the user's line where it is known; what was found out until then
    is in the other fields. ``native`` are the operators that TVM compiles, ``aten_calls`` those
    that stay PyTorch's kernels, ``refused`` those that can be neither. ``joint`` and
    ``joint_reason`` tell where the joint function comes from (None in inference) and why it is not
    ``relax``. ``residuals`` are the values that forward keeps for backward by ``residual_policy``,
    the largest first. ``frozen`` are numbers, strings and containers that would be constants of the
    code, by name: arguments that are no tensors, and attributes that forward reads; calls that come
    with others are not served by this code. ``packs`` names the weights of products that would
    become one. ``eager_functions`` would run in eager PyTorch after the compiled code.
    ``fx_passes`` is what the fx passes of the options did.
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
    frozen: Mapping[str, str] = field(default_factory=dict)
    packs: tuple[tuple[str, ...], ...] = ()
    eager_functions: tuple[str, ...] = ()
    fx_passes: tuple[PassRecord, ...] = ()

    @property
    def residual_bytes(self) -> int:
        """Bytes that forward would keep for backward."""
        return sum(r.spec.nbytes for r in self.residuals)

    @property
    def combined_products(self) -> int:
        """How many products would become part of another one."""
        return sum(len(names) for names in self.packs)

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=110)

        def say(text: str) -> None:
            console.print(text, highlight=False, markup=False)

        say(f"{self.module} ({self.mode}): {'whole, one graph' if self.ok else 'its own forward'}")
        if not self.ok:
            say(f"  refused at {self.stage}: {self.reason}")
            if self.source and self.source not in self.reason:
                say(f"  at {self.source}")
        if self.native or self.aten_calls or self.refused:
            console.print(_operators(self))
        for line in self._lines():
            say(line)
        file = console.file
        assert isinstance(file, io.StringIO)
        return file.getvalue()

    def _lines(self) -> list[str]:
        """The rest, a line each."""
        lines = []
        for draw in self.noise:
            at = f", {draw.source}" if draw.source else ""
            lines.append(f"draws {draw.spec} for {draw.purpose} by {draw.operator}{at}")
        lines += [f"writes its {m.kind} {m.target}" for m in self.mutations]
        if self.joint is not None:
            why = f", because {self.joint_reason}" if self.joint_reason else ""
            lines.append(f"gradient by {self.joint}{why}")
            lines.append(f"{residuals_text(self.residuals)}, by {self.residual_policy}")
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
            # Lines are of interest where something is not as fast as it could be.
            lines = () if kind == "native" else operator.sources
            shown = [*lines[:_LINES], *([f"{len(lines) - _LINES} more"] * (len(lines) > _LINES))]
            if operator.reason:
                shown.append(operator.reason)
            table.add_row(operator.name, kind, str(operator.count), _plain("\n".join(shown)))
    return table


def _plain(text: str) -> str:
    """``text`` without what rich would take for markup."""
    return text.replace("[", r"\[")
