"""What TorchDynamo calls in place of a graph."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import is_
from typing import Any

import torch
from torch import nn

from tvmbridge.compiler.compiled import CompiledModule
from tvmbridge.core.libraries import register_containers
from tvmbridge.core.options import CompileOptions
from tvmbridge.dynamo.graphs import DynamoGraph
from tvmbridge.runtime.dispatcher import Dispatcher

# After so many calls the code for tensors that none of them came with is let go.
_CALLS_TO_FORGET = 1024


@dataclass(eq=False)
class _Held:
    """The code for one choice of the tensors that the captured model holds, and its last call."""

    tensors: tuple[torch.Tensor, ...]
    dispatcher: Dispatcher
    last_call: int = 0


class CompiledGraph:
    """A graph of Dynamo, called as Dynamo calls it, on the dispatch of a module of it.

    Dynamo has one graph for all modules of a class: each choice of parameters has a dispatch of its
    own, and they share compiled code.

    Args:
        graph: the graph.
        options: how it is compiled.
        instead: makes the code in place of :func:`compile_module`.
    """

    def __init__(
        self,
        graph: DynamoGraph,
        options: CompileOptions,
        instead: Callable[..., CompiledModule] | None = None,
    ) -> None:
        self.graph = graph
        self.options = options
        self._instead = instead
        self._held_of, self._given_of = graph.held_of(), graph.given_of()
        self._known: dict[tuple[int, ...], _Held] = {}
        self._last: _Held | None = None
        self._calls = 0
        self._changing = threading.Lock()

    @property
    def dispatchers(self) -> list[Dispatcher]:
        """Those of all choices of parameters that are kept."""
        return [held.dispatcher for held in list(self._known.values())]

    def __call__(self, *args: Any) -> Any:
        tensors = self._held_of(args)
        held = self._last
        if held is None or not all(map(is_, tensors, held.tensors)):
            held = self._last = self._find_or_add(tensors)
        held.last_call = self._calls = self._calls + 1
        if not self._calls % _CALLS_TO_FORGET:
            self._forget()
        return held.dispatcher.call_by_dynamo(self._given_of(args))

    def _find_or_add(self, tensors: tuple[torch.Tensor, ...]) -> _Held:
        with self._changing:
            key = tuple(map(id, tensors))
            if key not in self._known:
                self._known[key] = _Held(tensors, self._dispatcher(tensors))
            return self._known[key]

    def _forget(self) -> None:
        """Let go of parameters that no call has come with for long: their model may be gone."""
        with self._changing:
            since = self._calls - _CALLS_TO_FORGET
            self._known = {k: held for k, held in self._known.items() if held.last_call > since}

    def _dispatcher(self, tensors: tuple[torch.Tensor, ...]) -> Dispatcher:
        module = self.graph.module(tensors)
        register_containers(module)
        dispatcher = Dispatcher(module, None, None, self.options, "silent")
        dispatcher.compiler = replace(dispatcher.compiler, instead=self._instead, background=None)
        dispatcher.compiles_signatures = True
        if self.graph.symbolic:
            dispatcher.serve_any_size()
        like = next(iter(self._known.values()), None)
        if like is not None:
            _share(like.dispatcher, dispatcher)
        module.__dict__["forward"] = dispatcher
        return dispatcher


def _share(known: Dispatcher, dispatcher: Dispatcher) -> None:
    """Give ``dispatcher`` the code of ``known``, whose module differs in its tensors alone."""
    memo = _memo(known.module, dispatcher.module)
    dispatcher.specializations = tuple(
        s.rebound(memo, dispatcher.packing) for s in known.specializations
    )
    dispatcher.packing.claim_like(known.packing)


def _memo(one: nn.Module, other: nn.Module) -> dict[int, Any]:
    """What a deep copy that made ``other`` of ``one`` would have kept in its memo."""
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
    """A graph that runs as Dynamo captured it, for a ``reason``, and how often it did."""

    def __init__(self, name: str, operators: int, run: Callable[..., Any], reason: str) -> None:
        self.name = name
        self.operators = operators
        self.reason = reason
        self.calls = 0
        self._run = run

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        return self._run(*args)
