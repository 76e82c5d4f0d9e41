"""A module in parts: TorchDynamo cuts its graph where PyTorch must run by itself.

The graphs between the cuts are served as those of ``torch.compile`` with this backend are; Python
runs what is between them, so that state, draws and hooks are as in eager PyTorch.
"""

from __future__ import annotations

import inspect
import logging
import re
import threading
import types
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from tvmbridge.core.errors import FallbackError
from tvmbridge.core.torch_private import dynamo_config, graph_breaks
from tvmbridge.dynamo.backend import BackendOptions, graph_on_code
from tvmbridge.dynamo.calls import CompiledGraph, EagerGraph
from tvmbridge.dynamo.pieces import in_pieces
from tvmbridge.dynamo.report import graph_report
from tvmbridge.runtime.dispatcher import Dispatcher
from tvmbridge.runtime.parts import NO_PART, PartReport

# Settings of TorchDynamo that parts rely on, whatever the process has set.
_SETTINGS: Mapping[str, Any] = {
    # An error of TorchDynamo's leaves a function to Python, before any of it has run.
    "suppress_errors": True,
    # Hooks that come after a capture are noticed.
    "skip_nnmodule_hook_guards": False,
    # TorchDynamo takes numpy's random numbers from PyTorch's generator.
    "trace_numpy": False,
    "capture_scalar_outputs": False,
    "capture_dynamic_output_shape_ops": False,
    # All layers of a class share the code of their forward.
    "recompile_limit": 64,
}


class _Call(threading.local):
    """What the call of now has come to in its thread.

    depth: how many calls of modules in parts are under way, one within another.
    ran: how many parts of the innermost one compiled code has begun to serve.
    reasons: why PyTorch has served a part that is large enough.
    """

    depth = 0
    ran = 0
    reasons: tuple[str, ...] = ()


_now = _Call()


class _AdviceLeftOut(logging.Filter):
    """Drops TorchDynamo's advice on settings that parts do not take from the process."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is logged."""
        return not (_now.depth and "Tensor.item()" in record.getMessage())


logging.getLogger("torch._dynamo.variables.tensor").addFilter(_AdviceLeftOut())


class ModuleInParts:
    """The parts of a dispatcher's module."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._tally = dispatcher.tally
        self._options = BackendOptions(dispatcher.options)
        self._compiled: tuple[Callable[..., Any], Callable[..., Any]] | None = None
        # As long as TorchDynamo keeps them, each with why it ends.
        self._graphs: weakref.WeakKeyDictionary[CompiledGraph | EagerGraph, str]
        self._graphs = weakref.WeakKeyDictionary()
        self._made = 0
        self._breaks: Counter[str] = Counter()

    def run(
        self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any, str | None]:
        """As :meth:`~tvmbridge.runtime.parts.Parts.run`."""
        made, breaks = self._made, graph_breaks()
        outer = _now.ran, _now.reasons
        _now.depth, _now.ran, _now.reasons = _now.depth + 1, 0, ()
        try:
            with dynamo_config().patch(**_SETTINGS):
                results = self._called(original, args, kwargs)
            ran, reasons = _now.ran, _now.reasons
        finally:
            _now.depth -= 1
            _now.ran, _now.reasons = outer
        if self._made != made:
            self._breaks += graph_breaks() - breaks
        reason = next(iter(reasons), None if ran else NO_PART)
        return results, reason

    def _called(
        self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """What ``original``, the forward that the module has now, returns, run in parts."""
        # TorchDynamo keeps the function that it is given, and a bound method has the module.
        function = original
        if isinstance(original, types.MethodType):
            function, args = original.__func__, (original.__self__, *args)
        if self._compiled is None or self._compiled[0] is not function:
            isolated: dict[str, Any] = {}
            if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
                isolated["isolate_recompiles"] = True
            self._compiled = function, torch.compile(function, backend=self._backend, **isolated)
        return self._compiled[1](*args, **kwargs)

    def _backend(self, graph_module: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        """What TorchDynamo is to call in place of a graph."""
        return in_pieces(graph_module, self._part) or self._part(graph_module)

    def _part(self, graph_module: fx.GraphModule) -> Callable[..., Any]:
        """What is to be called in place of a part."""
        graph = graph_on_code(graph_module, self._options)
        self._made += 1
        self._graphs[graph] = _end(graph_module)
        run = graph.call
        if isinstance(graph, CompiledGraph):
            graph.noted = self._note

            def serve(*args: Any) -> Any:
                _now.ran += 1
                return run(*args)

            return serve
        if graph.small:
            return run
        reason = graph.reason

        def leave(*args: Any) -> Any:
            self._note(reason)
            return run(*args)

        return leave

    def _note(self, reason: str) -> None:
        """Note that PyTorch is about to serve a part."""
        _now.reasons = (*_now.reasons, f"of a part of it, {reason}")
        if self._tally.on_fallback == "raise":
            raise FallbackError(f"a part of the module is not served by TVM: {reason}")

    def reports(self) -> tuple[PartReport, ...]:
        """As :meth:`~tvmbridge.runtime.parts.Parts.reports`."""
        found = []
        for graph, ends in list(self._graphs.items()):
            of = graph_report(graph)
            found.append(PartReport(_shown(of.name), of.operators, of.calls, of.eager_calls, ends))
        return tuple(found)

    def breaks(self) -> Mapping[str, int]:
        """As :meth:`~tvmbridge.runtime.parts.Parts.breaks`."""
        return dict(self._breaks)


def _shown(name: str) -> str:
    """The name of a part for people: TorchDynamo names what follows a cut by its line."""
    behind = re.fullmatch(r"torch_dynamo_resume_in_(.+)_at_(\d+)", name)
    return f"{behind[1]} from line {behind[2]} on" if behind else name


def _end(graph_module: fx.GraphModule) -> str:
    """Why a graph ends, and in which line of the user's; empty where a function returns."""
    cause = getattr(graph_module, "compile_subgraph_reason", None)
    if cause is None or not cause.graph_break:
        return ""
    reason = str(cause.reason).strip().partition("\n")[0]
    if not cause.user_stack:
        return reason
    line = cause.user_stack[-1]
    return f"{reason}, at {Path(line.filename).name}:{line.lineno}"
