"""The callables that TorchDynamo calls in place of a captured graph."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from tvmbridge.compiler.compiled import CompiledModule
from tvmbridge.core.libraries import register_containers
from tvmbridge.core.locks import Lock
from tvmbridge.core.options import CompileOptions
from tvmbridge.core.profiling import profiling
from tvmbridge.dynamo.graphs import DynamoGraph, Given
from tvmbridge.runtime.dispatcher import Dispatcher
from tvmbridge.runtime.module_code import ModuleCode

# Code for parameters that no call has used within this many calls is dropped.
_CALLS_TO_FORGET = 1024
_NO_KEYWORDS: dict[str, Any] = {}


@dataclass(eq=False)
class _Held:
    """The dispatch of a graph for one set of the model's parameters and buffers.

    - ``given``: picks the other arguments from a call's arguments; None if the call has other
      parameters or buffers.
    - ``code``: the compiled code of a module that holds the parameters and buffers.
    - ``dispatcher``: the forward of this module.
    - ``used``: whether a call has used this dispatch since unused ones were last dropped.
    """

    given: Given
    code: ModuleCode
    dispatcher: Dispatcher
    used: bool = True


class CompiledGraph:
    """A graph of Dynamo that runs as a dispatched module; Dynamo calls ``call``.

    Dynamo may use one graph for several modules of a class. Each set of parameters then has its own
    dispatch, and all of them share compiled code.

    Args:
        instead: compiles the module in place of :func:`compile_module`; None: that function.
        like: runs the same ``graph``, and its code serves this one's calls too.
    """

    def __init__(
        self,
        graph: DynamoGraph,
        options: CompileOptions,
        instead: Callable[..., CompiledModule] | None = None,
        like: CompiledGraph | None = None,
    ) -> None:
        self.graph = graph
        self.options = options
        self._instead = instead
        self._like = like
        self._held_of = graph.held_of()
        # Called with the reason when a call falls back to eager PyTorch.
        self.noted: Callable[[str], None] | None = None
        self._known: dict[tuple[int, ...], _Held] = {}
        self._last: _Held | None = None
        self._changing = Lock()
        self.call = self._calling()

    @property
    def codes(self) -> list[ModuleCode]:
        """The compiled code for each set of parameters that is kept."""
        return [held.code for held in list(self._known.values())]

    def _calling(self) -> Callable[..., Any]:
        """Return the function that Dynamo calls; a function is faster to call than an object."""
        due = itertools.cycle([*[False] * (_CALLS_TO_FORGET - 1), True])

        def call(*args: Any) -> Any:
            held = self._last
            given = None if held is None else held.given(args)
            if held is None or given is None:
                held = self._last = self._find_or_add(self._held_of(args))
                given = held.given(args)
                assert given is not None
            held.used = True
            if next(due):
                self._forget()
            for fast, _ in held.code.paths.known:
                leaves = fast.guard.check_under_dynamo(given, _NO_KEYWORDS)
                if leaves is None:
                    break
                direct = fast.direct
                if direct is not None and not profiling():
                    return direct(leaves)
                return fast.entry.run_fast(fast, leaves, (given, _NO_KEYWORDS))
            return held.dispatcher(*given)

        return call

    def _find_or_add(self, tensors: tuple[torch.Tensor, ...]) -> _Held:
        with self._changing:
            key = tuple(map(id, tensors))
            if key not in self._known:
                code = self._code(tensors)
                dispatcher = code.module.__dict__["forward"] = Dispatcher(code)
                self._known[key] = _Held(self.graph.given_with(tensors), code, dispatcher)
            return self._known[key]

    def _forget(self) -> None:
        """Drop the dispatches that were not used since the last drop: their model may be gone."""
        with self._changing:
            self._known = {key: held for key, held in self._known.items() if held.used}
            for held in self._known.values():
                held.used = False

    def _code(self, tensors: tuple[torch.Tensor, ...]) -> ModuleCode:
        module = self.graph.module(tensors)
        register_containers(module)
        code = ModuleCode(module, None, None, self.options, "silent")
        code.tally.noted = self.noted
        policy = code.policy
        policy.compiler = replace(policy.compiler, instead=self._instead, background=None)
        policy.compiles_signatures = True
        if self.graph.symbolic:
            # Code of a graph whose rows are no symbol is for one number of rows.
            policy.serve_any_size(guesses=self.graph.symbolic_rows)
        others = () if self._like is None else tuple(self._like._known.values())
        like = next(iter((*self._known.values(), *others)), None)
        if like is not None:
            code.share(like.code, _memo(like.code.module, module))
        return code


def _memo(one: nn.Module, other: nn.Module) -> dict[int, Any]:
    """Return the memo that a deep copy of ``one`` to ``other`` would have filled."""
    memo: dict[int, Any] = {}
    for module, counterpart in zip(one.modules(), other.modules(), strict=True):
        memo[id(module)] = counterpart
        for name in ("_parameters", "_buffers", "_modules"):
            memo[id(module.__dict__[name])] = counterpart.__dict__[name]
        for held in ("_parameters", "_buffers"):
            for name, tensor in module.__dict__[held].items():
                memo[id(tensor)] = counterpart.__dict__[held][name]
    return memo


class EagerGraph:
    """A graph that runs in eager PyTorch as Dynamo captured it.

    - ``name``: the class of the captured module, or the name of the function.
    - ``operators``: the number of its operators.
    - ``reason``: why it is not compiled.
    - ``small``: whether it has too few operators to be compiled.
    - ``calls``: the number of its calls so far.
    """

    def __init__(
        self,
        name: str,
        operators: int,
        run: Callable[..., Any],
        reason: str,
        *,
        small: bool = False,
    ) -> None:
        self.small = small
        self.name = name
        self.operators = operators
        self.reason = reason
        self.calls = 0
        self._run = run

    def call(self, *args: Any) -> Any:
        """Run the graph; Dynamo calls this method in place of the graph."""
        self.calls += 1
        return self._run(*args)
