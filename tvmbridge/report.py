"""What a dispatched module did so far, as data and as a table."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from tvmbridge.types import PassRecord


@dataclass(frozen=True)
class SpecializationReport:
    """One compiled signature in one mode.

    ``seconds`` are by stage of compilation; ``residual_bytes`` is what forward keeps for backward
    beyond its inputs and outputs; operators are counted by ATen overload. ``joint`` is the source
    of the joint function, ``joint_reason`` says why it is not ``relax``.
    """

    mode: str
    signature: str
    target: str
    joint: str | None
    joint_reason: str
    calls: int
    seconds: Mapping[str, float]
    residual_bytes: int
    native_operators: Mapping[str, int]
    aten_operators: Mapping[str, int]
    passes: tuple[PassRecord, ...]


@dataclass(frozen=True)
class PackReport:
    """Parameters that compiled code reads as one tensor.

    ``packed`` says how often they were moved to lie side by side, ``concatenated`` how many calls
    had to concatenate their values instead, by reason.
    """

    names: tuple[str, ...]
    packed: int
    concatenated: Mapping[str, int]

    def __str__(self) -> str:
        line = f"packed {self.packed} times: {', '.join(self.names)}"
        for reason, calls in self.concatenated.items():
            line += f"; concatenated in {calls} calls, because {reason}"
        return line


@dataclass(frozen=True)
class DispatchReport:
    """Calls served by TVM, fallbacks by reason, packed weights, and each specialisation.

    ``dropped`` counts the specialisations that gave way to newer ones.
    """

    tvm_calls: int
    fallbacks: dict[str, int]
    aten_calls: list[str]
    specializations: list[SpecializationReport]
    dropped: int = 0
    packs: tuple[PackReport, ...] = ()

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=110)
        console.print(f"calls served by TVM: {self.tvm_calls}")
        console.print(_specialization_table(self.specializations))
        if self.dropped:
            console.print(f"specialisations dropped, not used for longest: {self.dropped}")
        for reason in dict.fromkeys(s.joint_reason for s in self.specializations):
            if reason:
                console.print(f"joint by PyTorch's own derivatives: {reason}", highlight=False)
        for pack in self.packs:
            console.print(str(pack), highlight=False)
        if self.fallbacks:
            table = Table("calls to the module's own forward, because", "calls")
            for reason, count in self.fallbacks.items():
                table.add_row(reason, str(count))
            console.print(table)
        if self.aten_calls:
            console.print("ATen calls (PyTorch's kernels): " + ", ".join(self.aten_calls))
        file = console.file
        assert isinstance(file, io.StringIO)
        return file.getvalue()


def _specialization_table(specializations: list[SpecializationReport]) -> Table:
    table = Table("mode", "signature", "joint", "calls", "compile s", "residual MB", "native/ATen")
    for s in specializations:
        table.add_row(
            s.mode,
            s.signature,
            s.joint or "-",
            str(s.calls),
            " ".join(f"{stage} {seconds:.1f}" for stage, seconds in s.seconds.items()),
            f"{s.residual_bytes / 1e6:.1f}",
            f"{sum(s.native_operators.values())}/{sum(s.aten_operators.values())}",
        )
    return table
