"""The forward that is traced: the module's own, wrapped so that its side effects are results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any

import torch
from torch import nn

from tvmbridge.calls.arguments import ArgumentWatch, places_of
from tvmbridge.calls.bases import WithBases
from tvmbridge.calls.standins import as_captured, transforms_ended
from tvmbridge.core.assumptions import Answer, Check
from tvmbridge.core.autocast import Autocast, under_autocast
from tvmbridge.core.number_inputs import NumberRange
from tvmbridge.core.structure import unflatten
from tvmbridge.core.torch_private import pytree
from tvmbridge.core.types import Epilogue, IntermediateBase, Left
from tvmbridge.graph_capture.epilogue import EpilogueRecorder
from tvmbridge.graph_capture.trace.adopted import adopted_are_read
from tvmbridge.graph_capture.trace.answers import Answers, buffers_of
from tvmbridge.graph_capture.trace.exchanges import exchanges_written
from tvmbridge.graph_capture.trace.held_numbers import HeldOfCall, held_by
from tvmbridge.graph_capture.trace.left import (
    LeftFinder,
    LeftWatch,
    data_dependent_assigned,
    objects_of,
)
from tvmbridge.graph_capture.trace.number_calls import numbers_traced
from tvmbridge.graph_capture.trace.old_norms import norms_put_back
from tvmbridge.graph_capture.trace.written_attention import refuse_weights


@dataclass(kw_only=True, eq=False)
class TracedForward:
    """The forward of a module, as every trace calls it.

    Settings:

    - ``module``: the module whose forward is wrapped
    - ``is_compiling``: the value that ``torch.compiler.is_compiling()`` returns within forward
    - ``differentiated``: whether the results will be differentiated
    - ``values``: the values of the module's small buffers by name, and of arguments by place
    - ``bases``: the intermediate view bases that are returned as additional results
    - ``exported``: whether torch.export calls it; it refuses rebound attributes, so the module
      gets its old attributes back
    - ``autocast``: the autocast state that forward runs under
    - ``left``: the attributes in which forward leaves values behind, which become additional
      results; None: they are found during the call
    - ``numbers``: by the position of a leaf of the arguments, the values of a number that is an
      input; the call is given a tensor there, and narrows the values

    Set by a call:

    - ``changed_arguments``: the positions and keywords of the containers that forward mutated
    - ``ways``: how each of these attributes gets its value
    - ``checks``: the checks of values that became outputs
    - ``answers``: the guards on small buffers and arguments
    - ``epilogue``: computes the data-dependent results; None if there are none
    - ``held``: the numbers in attributes that are inputs; None before a call
    """

    module: nn.Module
    is_compiling: bool
    differentiated: bool
    values: Mapping[str, torch.Tensor]
    bases: Sequence[IntermediateBase] = ()
    exported: bool = False
    autocast: Autocast = ()
    changed_arguments: tuple[Any, ...] = ()
    checks: tuple[Check, ...] = ()
    answers: tuple[Answer, ...] = ()
    left: Sequence[tuple[str, str]] | None = ()
    ways: Mapping[tuple[str, str], Left] = field(default_factory=dict)
    epilogue: Epilogue | None = None
    numbers: dict[int, NumberRange] = field(default_factory=dict)
    held: HeldOfCall | None = None

    def __post_init__(self) -> None:
        # The current forward, which may be a patched one.
        self._forward = self.module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stand_ins = {**buffers_of(self.module), **places_of(args, kwargs)}
        answers = Answers(self.values, stand_ins, self.autocast)
        held = self.held = HeldOfCall(self.module)
        own = partial(self._own, held)
        leaving = self._leaving(own)

        def left(*args: Any, **kwargs: Any) -> Any:
            results = (leaving or own)(*args, **kwargs)
            # LeftWatch returns a pair only if it has found something itself.
            alone = held.ways and not (leaving and leaving.ways)
            return (results, ()) if alone else results

        watch = ArgumentWatch(left, older=list(objects_of(self.module, (args, kwargs))))

        def answered(*args: Any, **kwargs: Any) -> Any:
            with answers:
                return watch(*args, **kwargs)

        recorder = EpilogueRecorder(answered, differentiated=self.differentiated)
        results = WithBases(recorder, self.bases)(*args, **kwargs)
        refuse_weights(self.module, results)
        self.changed_arguments, self.checks = watch.changed, watch.checks
        self.ways = {**(leaving.ways if leaving else {}), **held.ways}
        self.answers, self.epilogue = tuple(answers.answers), recorder.epilogue
        return results

    def _leaving(self, own: Callable[..., Any]) -> LeftWatch | LeftFinder | None:
        """Wrap ``own`` to return also the values that it leaves in attributes; None without any."""
        if self.left is None:
            return LeftFinder(own, self.module)
        held = held_by(self.module).values()
        left = [key for key in self.left if key not in held]
        return LeftWatch(own, self.module, left) if left else None

    def _own(self, held: HeldOfCall, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            stack.enter_context(transforms_ended())
            if self.exported:
                stack.enter_context(data_dependent_assigned())
                stack.enter_context(exchanges_written(self.module))
                stack.enter_context(norms_put_back(self.module))
            stack.enter_context(as_captured(self.is_compiling))
            stack.enter_context(under_autocast(self.autocast))
            adopted = stack.enter_context(adopted_are_read(self.module))
            if not (self.numbers or held.ranges):
                return adopted.in_results(self._forward(*args, **kwargs))
            called = stack.enter_context(numbers_traced(self.module, self.numbers, held))
            return adopted.in_results(called(self._forward, args, kwargs))

    @contextmanager
    def in_place(self, structure: pytree.TreeSpec | None = None) -> Iterator[None]:
        """Install this object as the ``forward`` of the module within the context.

        If ``structure`` is given, the installed forward takes the leaves of its arguments by
        position, and ``structure`` is their structure.
        """
        held = self.module.__dict__
        own = held.get("forward")

        # torch.export reads the signature, and the code, of a function.
        @wraps(self._forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if structure is not None:
                args, kwargs = unflatten(args, structure)
            return self(*args, **kwargs)

        held["forward"] = forward
        try:
            yield
        finally:
            held.pop("forward") if own is None else held.update(forward=own)
