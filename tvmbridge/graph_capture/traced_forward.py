"""The forward that is traced: a module's own, within what watches and completes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
from torch import nn

from tvmbridge.core.assumptions import Answer, Check
from tvmbridge.core.types import Epilogue, IntermediateBase
from tvmbridge.graph_capture.epilogue import EpilogueRecorder
from tvmbridge.graph_capture.memory.bases import WithBases
from tvmbridge.graph_capture.trace.answers import Answers, buffers_of
from tvmbridge.graph_capture.trace.arguments import ArgumentWatch
from tvmbridge.graph_capture.trace.exchanges import exchanges_written
from tvmbridge.graph_capture.trace.old_norms import norms_put_back
from tvmbridge.graph_capture.trace.standins import as_captured


class TracedForward:
    """The forward of a module as every trace calls it; its attributes describe the last call.

    ``changed_arguments`` are the positions and keywords of the containers that it changed,
    ``checks`` says what is raised where a check of values does not pass, ``answers`` what it was
    told of small buffers, and ``epilogue`` computes its data-dependent results.

    Args:
        module: whose forward it is, as of now: in a trace it may be a replaced one.
        is_compiling: what ``torch.compiler.is_compiling()`` returns within it.
        differentiated: whether the results will be.
        values: what the small buffers of the module hold, by name.
        bases: of which results the intermediate view bases are returned as well.
        exported: whether torch.export calls it, which refuses rebound attributes: the module gets
            its old ones back.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        is_compiling: bool,
        differentiated: bool,
        values: Mapping[str, torch.Tensor],
        bases: Sequence[IntermediateBase] = (),
        exported: bool = False,
    ) -> None:
        self.changed_arguments: tuple[Any, ...] = ()
        self.checks: tuple[Check, ...] = ()
        self.answers: tuple[Answer, ...] = ()
        self.epilogue: Epilogue | None = None
        self._module = module
        self._forward = module.forward
        self._is_compiling = is_compiling
        self._differentiated = differentiated
        self._values = values
        self._bases = bases
        self._exported = exported

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        answers = Answers(self._values, buffers_of(self._module))
        watch = ArgumentWatch(self._own)

        def answered(*args: Any, **kwargs: Any) -> Any:
            with answers:
                return watch(*args, **kwargs)

        recorder = EpilogueRecorder(answered, differentiated=self._differentiated)
        results = WithBases(recorder, self._bases)(*args, **kwargs)
        self.changed_arguments, self.checks = watch.changed, watch.checks
        self.answers, self.epilogue = tuple(answers.answers), recorder.epilogue
        return results

    def _own(self, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            if self._exported:
                stack.enter_context(exchanges_written(self._module))
                stack.enter_context(norms_put_back(self._module))
            stack.enter_context(as_captured(self._is_compiling))
            return self._forward(*args, **kwargs)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within it it is the ``forward`` of the module."""
        held = self._module.__dict__
        own = held.get("forward")

        # torch.export reads the signature, and the code, of a function.
        @wraps(self._forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self(*args, **kwargs)

        held["forward"] = forward
        try:
            yield
        finally:
            held.pop("forward") if own is None else held.update(forward=own)
