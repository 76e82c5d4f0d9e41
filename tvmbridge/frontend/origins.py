"""The origin of a value, its submodule and the user's line, kept as the span of its Relax call.

Passes of TVM and tvmbridge keep spans. A call that a pass adds may have none.
"""

from __future__ import annotations

import functools
import json
import linecache
import os
import re
from dataclasses import dataclass
from typing import Any

import torch
import tvm
from torch import fx
from tvm import relax

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (.+)')
_TORCH = f"{os.path.dirname(torch.__file__)}/"
_OWN = f"{os.path.dirname(os.path.dirname(os.path.abspath(__file__)))}/"
_FOREIGN = (_TORCH, _OWN, "/contextlib.py", "<frozen", "<string>", "<eval_with_key>")


@dataclass(frozen=True)
class Origin:
    """The submodules that an operator ran in, and the line of the user's code that called it.

    - ``modules``: pairs of a submodule's dotted path and class name, from the outermost to the
      innermost, without the whole module.
    - ``file``: the file; empty if the line is not known.
    - ``line``: the line in the file.
    - ``function``: the name of the function that has the line.
    """

    modules: tuple[tuple[str, str], ...] = ()
    file: str = ""
    line: int = 0
    function: str = ""

    @property
    def place(self) -> str:
        """The innermost submodule and the line, as `` in layer.0 (model.py:12)``."""
        inside = f" in {self.modules[-1][0]}" if self.modules else ""
        return f"{inside} ({self.file}:{self.line})" if self.file else inside

    def span(self) -> tvm.ir.Span:
        """Encode the origin as a span of TVM."""
        text = json.dumps([self.modules, self.file, self.function])
        return tvm.ir.Span(tvm.ir.SourceName(text), self.line, self.line, 0, 0)


def origin_of_node(node: fx.Node) -> Origin | None:
    """Return the origin of an fx node; None if the trace does not know it."""
    span = span_of_node(node)
    return None if span is None else _parsed(str(span.source_name.name), int(span.line))


def span_of_node(node: fx.Node) -> tvm.ir.Span | None:
    """Return the span for the Relax of an fx node; None if the trace does not know its origin.

    In a joint graph, an operator of backward has the submodules of its forward operator.
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
    """Return file, line and function of the innermost frame of user code in a traceback.

    Frames of PyTorch, tvmbridge and generated code do not count. If there are no others, return
    the innermost forward of a layer of PyTorch, or the first frame; None if there is no frame.
    """
    frames = [m for m in map(_FRAME.search, stack_trace.splitlines()) if m is not None]
    own = [m for m in frames if not any(part in m[1] for part in _FOREIGN)]
    if not frames:
        return None
    layers = [m for m in frames if f"{_TORCH}nn/modules/" in m[1] and m[3] == "forward"]
    file, line, function = (own or layers or frames[:1])[-1].groups()
    return file, int(line), function


def user_source(stack_trace: str | None) -> str:
    """Return the user's own line in a Python traceback, as ``file:line in function: code``."""
    frame = user_frame(stack_trace or "")
    if frame is None:
        return ""
    file, line, function = frame
    text = f"{file.rsplit('/', 1)[-1]}:{line} in {function}"
    code = linecache.getline(file, line).strip()
    return f"{text}: {code}" if code else text


def origin_of(expr: relax.Expr) -> Origin | None:
    """Return the origin that the span of an expression encodes, or None."""
    span = getattr(expr, "span", None)
    if not isinstance(span, tvm.ir.Span):
        return None
    return _parsed(str(span.source_name.name), int(span.line))


@functools.lru_cache(maxsize=4096)
def _parsed(text: str, line: int) -> Origin | None:
    try:
        modules, file, function = json.loads(text)
    except (TypeError, ValueError):
        return None  # a span that tvmbridge did not create
    return Origin(tuple((path, name) for path, name in modules), file, line, function)
