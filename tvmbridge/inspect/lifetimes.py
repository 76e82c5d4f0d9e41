"""Draw the lifetimes of a function's buffers, and which buffers share memory, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import graphviz
import tvm
from tvm import relax

from tvmbridge.backends import known_target
from tvmbridge.compiler.buffers import Buffer, BufferPlan
from tvmbridge.compiler.build import planned

# Consecutive buffers in one memory alternate between two colors.
_COLORS = ("lightblue", "lightyellow")
_RESULTS = "lightgrey"


def draw_lifetimes(functions: dict[str, relax.Function]) -> graphviz.Digraph:
    """Draw a table for each function with static sizes: a row for each memory, a column a step.

    A buffer is a cell from the step that writes it to the last step that uses it. Results share
    no memory, and come last.

    Raises:
        ValueError: every function has a symbolic size.
    """
    mod = tvm.IRModule({tvm.ir.GlobalVar(name or "main"): f for name, f in functions.items()})
    plans = planned(mod, known_target("llvm"))
    if not plans:
        raise ValueError("memory=True needs a function whose sizes are numbers")
    digraph = graphviz.Digraph("lifetimes", node_attr={"shape": "plain", "fontsize": "10"})
    for name, plan in plans.items():
        digraph.node(name, f"<{_table(name, plan)}>")
    return digraph


def _table(name: str, plan: BufferPlan) -> str:
    steps = range(len(plan.steps) + 1)
    title = f"{name}: {plan.reuse}"
    heads = [_cell("memory"), *(_cell(str(n), tip=_step(plan, n)) for n in steps)]
    rows = [_cell(title, span=len(steps) + 1), "".join(heads)]
    for number, nbytes in enumerate(plan.storages):
        inside = [b for b in plan.buffers if b.storage == number]
        rows.append(_row(f"{number}: {nbytes} bytes", inside, len(steps)))
    for buffer in plan.buffers:
        if buffer.storage is None:
            rows.append(_row("result", [buffer], len(steps)))
    body = "".join(f"<TR>{row}</TR>" for row in rows)
    return f'<TABLE BORDER="0" CELLBORDER="1" CELLSPACING="0">{body}</TABLE>'


def _step(plan: BufferPlan, number: int) -> str:
    return plan.steps[number] if number < len(plan.steps) else "the function returns"


def _row(head: str, buffers: Sequence[Buffer], steps: int) -> str:
    """Return the row of one memory: its buffers in order of time, with empty cells between."""
    cells, at = [_cell(head)], 0
    for turn, buffer in enumerate(sorted(buffers, key=lambda b: b.first)):
        cells += [_cell("")] * (buffer.first - at)
        size = "x".join(map(str, buffer.shape)) or "scalar"
        text = f"{buffer.name} {size} {buffer.dtype}"
        color = _RESULTS if buffer.storage is None else _COLORS[turn % 2]
        cells.append(_cell(text, color, span=buffer.last - buffer.first + 1))
        at = buffer.last + 1
    return "".join(cells + [_cell("")] * (steps - at))


def _cell(text: str, color: str = "", *, span: int = 1, tip: str = "") -> str:
    attributes = f' COLSPAN="{span}"' if span > 1 else ""
    if color:
        attributes += f' BGCOLOR="{color}"'
    if tip:
        attributes += f' TOOLTIP="{escape(tip)}" HREF="#"'
    return f"<TD{attributes}>{escape(text)}</TD>"
