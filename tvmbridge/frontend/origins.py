"""Where a value comes from: the submodule and the user's line, kept as the span of its Relax call.

TVM's passes and ours hand spans on. A call that a pass adds has none.
"""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass
from typing import Any

import tvm
from torch import fx
from tvm import relax

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (.+)')
_FOREIGN = ("/torch/", "/tvmbridge/", "/contextlib.py", "<frozen", "<string>", "<eval_with_key>")


@dataclass(frozen=True)
class Origin:
    """The submodules around an operator, from the outside to the inside, and its line.

    ``modules`` are pairs of the dotted path and the name of the class; the whole module, whose path
    is empty, is not among them. ``file`` is empty where the line is not known.
    """

    modules: tuple[tuple[str, str], ...] = ()
    file: str = ""
    line: int = 0
    function: str = ""

    def span(self) -> tvm.ir.Span:
        """The origin as a span."""
        text = json.dumps([self.modules, self.file, self.function])
        return tvm.ir.Span(tvm.ir.SourceName(text), self.line, self.line, 0, 0)


def span_of_node(node: fx.Node) -> tvm.ir.Span | None:
    """The span for the Relax of an fx node; None where the trace does not say where it is from.

    In a recorded joint graph backward's operators have the place of the forward ones.
    """
    meta = node.meta
    stack = meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack") or {}
    modules = tuple((str(path), _class_name(held)) for path, held in stack.values() if path)
    trace = meta.get("stack_trace") or ""
    return None if not modules and not trace else _span(modules, trace)


@functools.lru_cache(maxsize=4096)
def _span(modules: tuple[tuple[str, str], ...], trace: str) -> tvm.ir.Span:
    return Origin(modules, *(user_frame(trace) or ())).span()


def _class_name(held: Any) -> str:
    name = held if isinstance(held, str) else getattr(held, "__qualname__", "")
    return str(name).rpartition(".")[2]


def user_frame(stack_trace: str) -> tuple[str, int, str] | None:
    """File, line and function of the user's own frame in a Python traceback, the innermost one."""
    frames = [m for m in map(_FRAME.search, stack_trace.splitlines()) if m is not None]
    own = [m for m in frames if not any(part in m[1] for part in _FOREIGN)]
    if not frames:
        return None
    file, line, function = (own[-1] if own else frames[0]).groups()
    return file, int(line), function


def origin_of(expr: relax.Expr) -> Origin | None:
    """The origin that an expression carries, if it carries one."""
    span = getattr(expr, "span", None)
    if not isinstance(span, tvm.ir.Span):
        return None
    return _parsed(str(span.source_name.name), int(span.line))


@functools.lru_cache(maxsize=4096)
def _parsed(text: str, line: int) -> Origin | None:
    try:
        modules, file, function = json.loads(text)
    except (TypeError, ValueError):
        return None  # a span of somebody else's
    return Origin(tuple((path, name) for path, name in modules), file, line, function)
