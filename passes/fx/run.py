"""The runner of fx passes: it times each pass, records its rewrites, and can discard its result."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx
from torch.export import ExportedProgram

from tvmbridge.core.errors import PassError
from tvmbridge.core.pass_report import PassReport
from tvmbridge.core.types import PassRecord
from tvmbridge.passes.fx.base import is_operator

# Called with the graphs before and after a pass. It returns why the second is to be discarded, or
# None to keep it.
Veto = Callable[[fx.GraphModule, fx.GraphModule], str | None]


def run_fx_passes(
    graph_module: fx.GraphModule, passes: Sequence[Any], veto: Veto | None = None
) -> tuple[fx.GraphModule, tuple[PassRecord, ...]]:
    """Run ``passes`` in order; discard the result of a pass if ``veto`` returns a reason.

    Returns:
        The last graph module, and the record of each pass.

    Raises:
        PassError: a pass failed.
    """
    records = []
    for number, pass_ in enumerate(passes):
        report, start = PassReport(), time.perf_counter()
        name = type(pass_).__name__
        try:
            result = pass_.apply(graph_module, report)
        except PassError as error:
            abandon(passes[number + 1 :], error)
            raise
        except Exception as error:
            abandon(passes[number:], error)
            raise PassError(f"{name} failed: {type(error).__name__}: {error}") from error
        made = result.graph_module
        reason = veto(graph_module, made) if veto is not None and result.modified else None
        if reason is not None:
            report.decline("all of it", reason)
            report.rewrites, made = 0, graph_module
        records.append(_record(pass_, report, time.perf_counter() - start, graph_module, made))
        graph_module = made
    return graph_module, tuple(records)


def abandon(passes: Sequence[Any], error: BaseException) -> None:
    """Call ``abandon(error)`` on each of ``passes`` that has the method: it will not run."""
    for pass_ in passes:
        tell = getattr(pass_, "abandon", None)
        if tell is not None:
            tell(error)


def _record(
    pass_: Any, report: PassReport, seconds: float, before: fx.GraphModule, after: fx.GraphModule
) -> PassRecord:
    options = getattr(type(pass_), "__dataclass_fields__", {})
    return PassRecord(
        name=type(pass_).__name__,
        options=", ".join(f"{field}={getattr(pass_, field)!r}" for field in options),
        seconds=seconds,
        rewrites=report.rewrites,
        declined=tuple(report.declined),
        bindings_before=_operators(before),
        bindings_after=_operators(after),
        changed=after is not before and str(after.graph) != str(before.graph),
    )


def _operators(graph_module: fx.GraphModule) -> int:
    return sum(map(is_operator, graph_module.graph.nodes))


def rewrite_program(program: ExportedProgram, passes: Sequence[Any]) -> tuple[PassRecord, ...]:
    """Run ``passes`` on a program of torch.export, in place; its inputs and outputs stay.

    Raises:
        PassError: a pass failed, or changed the inputs or outputs of the program.
    """
    before = program.graph_module
    made, records = run_fx_passes(before, passes)
    if made is before:
        return records
    inputs = made.graph.find_nodes(op="placeholder")
    if [n.target for n in inputs] != [n.target for n in before.graph.find_nodes(op="placeholder")]:
        raise PassError("an fx pass has changed the inputs of the program")
    (results,) = made.graph.output_node().args
    signature = program.graph_signature
    # The copy of a graph renames nodes that have the name of a Python builtin.
    for spec, node in zip(signature.input_specs, inputs, strict=True):
        spec.arg.name = node.name
    if not isinstance(results, list | tuple) or len(results) != len(signature.output_specs):
        raise PassError("an fx pass has changed the outputs of the program")
    for made_spec, result in zip(signature.output_specs, results, strict=True):
        if isinstance(result, fx.Node):
            made_spec.arg.name = result.name
    before.graph = made.graph
    return records


def lines_of(record: PassRecord) -> list[str]:
    """Describe a record of a pass in lines of text."""
    before, after = record.bindings_before, record.bindings_after
    lines = [f"{record.name}: {before} operators became {after}"]
    if not record.rewrites:
        lines = [f"{record.name}: nothing"]
    return lines + [f"{record.name} declined {reason}" for reason in record.declined]
