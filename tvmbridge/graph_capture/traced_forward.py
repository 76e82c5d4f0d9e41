"""The forward that is traced: a module's own one within everything that watches or completes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import nn

from tvmbridge.core.assumptions import Answer, Check
from tvmbridge.core.types import Epilogue, IntermediateBase
from tvmbridge.graph_capture.epilogue import EpilogueRecorder
from tvmbridge.graph_capture.memory.bases import WithBases
from tvmbridge.graph_capture.trace.answers import Answering, buffers_of
from tvmbridge.graph_capture.trace.arguments import ArgumentWatch
from tvmbridge.graph_capture.trace.exchanges import ExchangesWritten
from tvmbridge.graph_capture.trace.old_norms import NormsPutBack
from tvmbridge.graph_capture.trace.standins import as_captured


class TracedForward:
    """The forward of a module as every trace calls it; what it met is known after a call.

    From the inside out: what attributes it rebinds is put back (in torch.export, which refuses
    rebound ones), the containers among its arguments and its checks of values are watched,
    questions to small buffers are answered, data-dependent results are deferred to the epilogue,
    and intermediate view bases are returned as well.

    It is made where the module has the forward that is to be traced: within
    :func:`~tvmbridge.graph_capture.trace.functions.functions_replaced`.

    Args:
        module: whose forward it is.
        is_compiling: what ``torch.compiler.is_compiling()`` says within it.
        differentiated: whether the results will be.
        values: what the small buffers of the module hold, by name.
        stand_ins: the tensors that stand for them; by default those that the module holds when it
            is called.
        bases: of which results the intermediate view bases are returned.
        exported: whether it is torch.export that calls it.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        is_compiling: bool,
        differentiated: bool,
        values: Mapping[str, torch.Tensor],
        stand_ins: Mapping[str, torch.Tensor] | None = None,
        bases: Sequence[IntermediateBase] = (),
        exported: bool = False,
    ) -> None:
        self._module = module
        forward: Callable[..., Any] = NormsPutBack(module) if exported else module.forward
        forward = as_captured(is_compiling)(forward)
        if exported:
            forward = ExchangesWritten(forward, module)
        self._arguments = ArgumentWatch(forward)
        held = partial(buffers_of, module) if stand_ins is None else lambda: stand_ins
        self._answering = Answering(self._arguments, values, held)
        self._epilogues = EpilogueRecorder(self._answering, differentiated=differentiated)
        self._forward = WithBases(self._epilogues, bases)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)

    @property
    def changed_arguments(self) -> tuple[Any, ...]:
        """The positions and keywords of the container arguments that forward changed."""
        return self._arguments.changed

    @property
    def checks(self) -> tuple[Check, ...]:
        """What is raised where a check of values does not pass."""
        return self._arguments.checks

    @property
    def answers(self) -> tuple[Answer, ...]:
        """What forward was told of small buffers."""
        return self._answering.answers

    @property
    def epilogue(self) -> Epilogue | None:
        """What computes the data-dependent results."""
        return self._epilogues.epilogue

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within it it is the ``forward`` of the module."""
        held = self._module.__dict__
        own = held.get("forward")

        # torch.export reads the signature, and the code, of a function.
        @wraps(self._module.forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self(*args, **kwargs)

        held["forward"] = forward
        try:
            yield
        finally:
            held.pop("forward") if own is None else held.update(forward=own)
