"""Run a module in parts: TorchDynamo cuts its graph at code that must run in eager PyTorch.

The graphs between the cuts run like graphs of ``torch.compile`` with this backend. Python runs the
code between them, so state, random draws and hooks behave as in eager PyTorch.
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

from tvmbridge.calls.patches import patched_here
from tvmbridge.calls.plain import distributed_in
from tvmbridge.core.errors import FallbackError, first_line
from tvmbridge.core.reasons import Kind, Reason
from tvmbridge.core.torch_private import (
    FakeImplCtx,
    captured_anew,
    dynamo_config,
    graph_breaks,
    skipped_frame,
    state_unlike_python,
)
from tvmbridge.dynamo.backend import BackendOptions, graph_on_code
from tvmbridge.dynamo.calls import CompiledGraph, EagerGraph
from tvmbridge.dynamo.pieces import assumed_in, in_pieces
from tvmbridge.dynamo.report import graph_report, leave_out_breaks
from tvmbridge.dynamo.tensor_parallel import has_distributed_inputs, in_local_parts, shared_key
from tvmbridge.dynamo.texts import formats_kept
from tvmbridge.runtime.module_code import ModuleCode
from tvmbridge.runtime.parts import NO_PART, PartReport

_SIZES = "capture_dynamic_output_shape_ops"
# Settings of TorchDynamo during a call in parts, whatever the process has set.
_SETTINGS: Mapping[str, Any] = {
    # If TorchDynamo fails on a function, Python runs the whole function.
    "suppress_errors": True,
    # Guards detect hooks that are added after a capture.
    "skip_nnmodule_hook_guards": False,
    # If it traced numpy, TorchDynamo would take numpy's random numbers from PyTorch's generator.
    "trace_numpy": False,
    "capture_scalar_outputs": False,
    # A graph that then holds for some sizes only is captured again without it.
    _SIZES: True,
    # A counter that decides sizes is an input from its second value on.
    "allow_unspec_int_on_nn_module": True,
    # All layers of a class share the code object of forward, and TorchDynamo counts by code object.
    "recompile_limit": 64,
}


def _unbounded_size(_: Any, context: Any, *, min: int = 0, max: int | None = None) -> Any:
    """Return a size that depends on data; PyTorch's default for libraries is a size of 2 or more.

    A graph would check this, and raise where ``torchvision.ops.nms`` keeps a single box.
    """
    return context.new_dynamic_size(min=min, max=max)


# By options and code: the first local part of that code, while any of them is left.
_local_parts: weakref.WeakValueDictionary[tuple[Any, ...], CompiledGraph]
_local_parts = weakref.WeakValueDictionary()
_UNTRACED = "PyTorch cannot write its DTensors as local tensors"
logger = logging.getLogger(__name__)


class _Call(threading.local):
    """The state of the current call of a module in parts, in one thread.

    - ``depth``: the number of nested calls of modules in parts.
    - ``ran``: the number of calls of compilable parts that the innermost call has begun.
    - ``reasons``: why PyTorch has served parts that are large enough to be compiled.
    """

    depth = 0
    ran = 0
    reasons: tuple[Reason, ...] = ()


_now = _Call()


class _AdviceLeftOut(logging.Filter):
    """Drop TorchDynamo's advice on ``Tensor.item()`` inside calls in parts.

    The advice is to change a setting, but ``_SETTINGS`` override it.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to log ``record``."""
        return not (_now.depth and "Tensor.item()" in record.getMessage())


logging.getLogger("torch._dynamo.variables.tensor").addFilter(_AdviceLeftOut())


class ModuleInParts:
    """A dispatched module, run as compiled parts with eager code between them.

    It implements :class:`~tvmbridge.runtime.parts.ServedParts`.
    """

    def __init__(self, code: ModuleCode) -> None:
        self._tally = code.tally
        self._options = BackendOptions(code.options)
        self._compiled: tuple[Callable[..., Any], Callable[..., Any]] | None = None
        # The graphs that TorchDynamo still keeps, each with the reason why it ends.
        self._graphs: weakref.WeakKeyDictionary[CompiledGraph | EagerGraph, str]
        self._graphs = weakref.WeakKeyDictionary()
        self.made = 0
        self._breaks: Counter[str] = Counter()
        self._settings = dict(_SETTINGS)

    def run(
        self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any, Reason | None]:
        """Run ``original``, the forward of the module, in parts.

        Returns:
            The results, and why compiled code has not served the call; None if it has.
        """
        made, breaks = self.made, graph_breaks()
        outer = _now.ran, _now.reasons
        _now.depth, _now.ran, _now.reasons = _now.depth + 1, 0, ()
        try:
            with (
                dynamo_config().patch(**self._settings),
                formats_kept(),
                patched_here(FakeImplCtx, "create_unbacked_symint", _unbounded_size),
            ):
                results = self._called(original, args, kwargs)
            ran, reasons = _now.ran, _now.reasons
        finally:
            _now.depth -= 1
            _now.ran, _now.reasons = outer
        found = graph_breaks() - breaks
        leave_out_breaks(found)
        if self.made != made:
            self._breaks += found
        reason = next(iter(reasons), None if ran else NO_PART)
        return results, reason

    def _called(
        self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Return the results of ``original``, run in parts."""
        # TorchDynamo keeps the function that it gets, and a bound method would keep the module.
        function = original
        if isinstance(original, types.MethodType):
            function, args = original.__func__, (original.__self__, *args)
        if self._compiled is None or self._compiled[0] is not function:
            options: dict[str, Any] = {}
            if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
                options["isolate_recompiles"] = True
            holder = args[0] if args else None
            if isinstance(holder, torch.nn.Module) and distributed_in(holder) is not None:
                # With symbolic sizes PyTorch's trace of DTensors exceeds the recursion limit.
                options["dynamic"] = False
            self._compiled = function, torch.compile(function, backend=self._backend, **options)
        return self._compiled[1](*args, **kwargs)

    def _backend(self, graph_module: fx.GraphModule, given: Sequence[Any]) -> Callable[..., Any]:
        """Return the function that runs a graph; TorchDynamo calls this method as its backend."""
        reason = state_unlike_python()
        if reason is not None:
            raise skipped_frame(reason)
        if has_distributed_inputs(graph_module):
            try:
                return in_local_parts(graph_module, given, self._local_part)
            except Exception as error:
                logger.warning("a graph with DTensors runs in eager PyTorch", exc_info=True)
                return self._left(graph_module.forward, f"{_UNTRACED}: {first_line(error)}")
        assumption = assumed_in(graph_module)
        if assumption is not None and self._settings[_SIZES]:
            # TorchDynamo then breaks the graph at the functions whose data decides a size.
            self._settings[_SIZES] = False
            setattr(dynamo_config(), _SIZES, False)
            raise captured_anew(assumption)
        return in_pieces(graph_module, self._part) or self._part(graph_module)

    def _part(self, graph_module: fx.GraphModule) -> Callable[..., Any]:
        """Return the function that runs a part, and record the part for the report."""
        return self._served(graph_module, graph_on_code(graph_module, self._options))

    def _local_part(self, graph_module: fx.GraphModule) -> Callable[..., Any]:
        """Return the function that runs a local part, which has no tensors of its own.

        Equal parts, such as those of equal blocks, share their code.
        """
        key = shared_key(graph_module)
        if key is None:
            return self._part(graph_module)
        like = _local_parts.get((repr(self._options), key))
        if like is not None:
            return self._served(graph_module, CompiledGraph(like.graph, like.options, like=like))
        graph = graph_on_code(graph_module, self._options)
        if isinstance(graph, CompiledGraph):
            _local_parts[repr(self._options), key] = graph
        return self._served(graph_module, graph)

    def _served(
        self, graph_module: fx.GraphModule, graph: CompiledGraph | EagerGraph
    ) -> Callable[..., Any]:
        """Return the function that runs the part ``graph``, and record it for the report."""
        self.made += 1
        self._graphs[graph] = _end(graph_module)
        run = graph.call
        if isinstance(graph, CompiledGraph):
            graph.noted = self._note

            def serve(*args: Any) -> Any:
                _now.ran += 1
                return run(*args)

            return serve
        return run if graph.small else self._left(run, graph.reason)

    def _left(self, run: Callable[..., Any], reason: str) -> Callable[..., Any]:
        """Return a function that calls ``run``, which PyTorch runs because of ``reason``."""

        def leave(*args: Any) -> Any:
            self._note(reason)
            return run(*args)

        return leave

    def _note(self, reason: str) -> None:
        """Record why PyTorch is about to run a part.

        Raises:
            FallbackError: the dispatch raises on fallbacks.
        """
        _now.reasons = (*_now.reasons, Reason(Kind.OF_PART, reason))
        if self._tally.on_fallback == "raise":
            raise FallbackError(f"a part of the module is not served by TVM: {reason}")

    def reports(self) -> tuple[PartReport, ...]:
        """Return a report of each part so far."""
        found = []
        for graph, ends in list(self._graphs.items()):
            of = graph_report(graph)
            found.append(PartReport(_shown(of.name), of.operators, of.calls, of.eager_calls, ends))
        return tuple(found)

    def breaks(self) -> Mapping[str, int]:
        """Return how often a graph was cut, by the reason."""
        return dict(self._breaks)


def _shown(name: str) -> str:
    """Return a readable name of a part; TorchDynamo names the code behind a cut by its line."""
    behind = re.fullmatch(r"torch_dynamo_resume_in_(.+)_at_(\d+)", name)
    return f"{behind[1]} from line {behind[2]} on" if behind else name


def _end(graph_module: fx.GraphModule) -> str:
    """Return why a graph ends, and at which line of user code; "" if the function returns there."""
    cause = getattr(graph_module, "compile_subgraph_reason", None)
    if cause is None or not cause.graph_break:
        return ""
    reason = str(cause.reason).strip().partition("\n")[0]
    if not cause.user_stack:
        return reason
    line = cause.user_stack[-1]
    return f"{reason}, at {Path(line.filename).name}:{line.lineno}"
