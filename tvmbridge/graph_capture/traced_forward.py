"""The forward that is traced: a module's own, within what watches and completes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from torch import nn

from tvmbridge.core.assumptions import Answer, Check
from tvmbridge.core.autocast import Autocast, under_autocast
from tvmbridge.core.structure import unflatten
from tvmbridge.core.torch_private import pytree
from tvmbridge.core.types import Epilogue, IntermediateBase, Left
from tvmbridge.graph_capture.epilogue import EpilogueRecorder
from tvmbridge.graph_capture.memory.bases import WithBases
from tvmbridge.graph_capture.trace.adopted import adopted_are_read
from tvmbridge.graph_capture.trace.answers import Answers, buffers_of
from tvmbridge.graph_capture.trace.arguments import ArgumentWatch
from tvmbridge.graph_capture.trace.exchanges import exchanges_written
from tvmbridge.graph_capture.trace.left import (
    LeftFinder,
    LeftWatch,
    data_dependent_assigned,
)
from tvmbridge.graph_capture.trace.old_norms import norms_put_back
from tvmbridge.graph_capture.trace.standins import as_captured, transforms_ended


@dataclass(kw_only=True, eq=False)
class TracedForward:
    """The forward of a module, as every trace calls it.

    ``is_compiling`` is what ``torch.compiler.is_compiling()`` returns within it,
    ``differentiated`` whether its results will be, ``values`` what the small buffers of the module
    hold, ``bases`` the intermediate view bases that it returns as well. ``exported``: torch.export
    calls it, which refuses rebound attributes, so that the module gets its old ones back.
    ``autocast`` is the state of autocast that forward finds. ``left`` are the attributes in which
    it leaves values, which are then results as well; None: they are yet to be found.

    After a call, ``changed_arguments`` are the positions and keywords of the containers that it
    mutated, ``ways`` how values are ``left``, ``checks`` the checks of values that became outputs,
    ``answers`` the guards on small buffers, and ``epilogue`` computes its data-dependent results.
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

    def __post_init__(self) -> None:
        # That of now, which may be a patched one.
        self._forward = self.module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        answers = Answers(self.values, buffers_of(self.module))
        leaving = self._leaving()
        watch = ArgumentWatch(leaving or self._own)

        def answered(*args: Any, **kwargs: Any) -> Any:
            with answers:
                return watch(*args, **kwargs)

        recorder = EpilogueRecorder(answered, differentiated=self.differentiated)
        results = WithBases(recorder, self.bases)(*args, **kwargs)
        self.changed_arguments, self.checks = watch.changed, watch.checks
        self.ways = leaving.ways if leaving else {}
        self.answers, self.epilogue = tuple(answers.answers), recorder.epilogue
        return results

    def _leaving(self) -> LeftWatch | LeftFinder | None:
        """The own forward, whose results are also what it leaves in attributes."""
        if self.left is None:
            return LeftFinder(self._own, self.module)
        return LeftWatch(self._own, self.module, self.left) if self.left else None

    def _own(self, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            stack.enter_context(transforms_ended())
            if self.exported:
                stack.enter_context(data_dependent_assigned())
                stack.enter_context(exchanges_written(self.module))
                stack.enter_context(norms_put_back(self.module))
            stack.enter_context(as_captured(self.is_compiling))
            stack.enter_context(under_autocast(self.autocast))
            adopted = stack.enter_context(adopted_are_read(self.module))
            return adopted.in_results(self._forward(*args, **kwargs))

    @contextmanager
    def in_place(self, structure: pytree.TreeSpec | None = None) -> Iterator[None]:
        """Within it it is the ``forward`` of the module.

        With a ``structure`` of the arguments, that forward takes their leaves by position.
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
