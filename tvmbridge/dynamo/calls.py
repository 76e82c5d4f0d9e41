"""What TorchDynamo calls in place of a graph."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from tvmbridge.compiler.compiled import CompiledModule
from tvmbridge.core.libraries import register_containers
from tvmbridge.core.options import CompileOptions
from tvmbridge.core.profiling import profiling
from tvmbridge.dynamo.graphs import DynamoGraph, Given
from tvmbridge.runtime.dispatcher import Dispatcher
from tvmbridge.runtime.fallbacks import Tally
from tvmbridge.runtime.guards.spelling import Mismatch

# After so many calls the code for tensors that none of them came with is let go.
_CALLS_TO_FORGET = 1024
_NO_KEYWORDS: dict[str, Any] = {}


@dataclass(eq=False)
class _Held:
    """The code for one choice of the tensors that the captured model holds.

    ``given`` are the arguments of a call, where it comes with these tensors. ``used``: a call came
    since tensors were let go of last.
    """

    given: Given
    dispatcher: Dispatcher
    used: bool = True


class CompiledGraph:
    """A graph of Dynamo on the dispatch of a module of it; ``call`` is what Dynamo calls.

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
        self._held_of = graph.held_of()
        # Called with the reason before PyTorch serves a call in place of the code.
        self.noted: Callable[[str], None] | None = None
        self._known: dict[tuple[int, ...], _Held] = {}
        self._last: _Held | None = None
        self._changing = threading.Lock()
        self.call = self._calling()

    @property
    def dispatchers(self) -> list[Dispatcher]:
        """Those of all choices of parameters that are kept."""
        return [held.dispatcher for held in list(self._known.values())]

    def _calling(self) -> Callable[..., Any]:
        """A function, which Python calls faster than an object."""
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
            for fast, _ in held.dispatcher.fast_paths:
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
                given = self.graph.given_with(tensors)
                self._known[key] = _Held(given, self._dispatcher(tensors))
            return self._known[key]

    def _forget(self) -> None:
        """Let go of parameters that no call has come with for long: their model may be gone."""
        with self._changing:
            self._known = {key: held for key, held in self._known.items() if held.used}
            for held in self._known.values():
                held.used = False

    def _dispatcher(self, tensors: tuple[torch.Tensor, ...]) -> Dispatcher:
        module = self.graph.module(tensors)
        register_containers(module)
        dispatcher = Dispatcher(module, None, None, self.options, "silent")
        if self.noted is not None:
            dispatcher.tally = _NotedTally(type(module).__name__, self.noted)
        dispatcher.compiler = replace(dispatcher.compiler, instead=self._instead, background=None)
        dispatcher.compiles_signatures = True
        if self.graph.symbolic:
            dispatcher.serve_any_size()
        like = next(iter(self._known.values()), None)
        if like is not None:
            _share(like.dispatcher, dispatcher)
        module.__dict__["forward"] = dispatcher
        return dispatcher


class _NotedTally(Tally):
    """Fallbacks that ``noted`` is told of, one by one."""

    def __init__(self, name: str, noted: Callable[[str], None]) -> None:
        super().__init__(name, "silent")
        self._noted = noted

    def note(self, why: str | Mismatch, *, settling: bool = False) -> None:
        """Count a call that PyTorch is to serve."""
        super().note(why, settling=settling)
        self._noted(why.reason if isinstance(why, Mismatch) else why)


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
    """A graph that runs as Dynamo captured it, for a ``reason``, and how often it did.

    ``small``: it has too few operators to be compiled.
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
        """What Dynamo calls."""
        self.calls += 1
        return self._run(*args)
