"""The function ``to_relay``: the forward of a module as text of TVM's Relay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from tvmbridge.core.alone import code_runs_alone
from tvmbridge.core.captured_graph import CapturedGraph
from tvmbridge.core.errors import ExportError
from tvmbridge.graph_capture.capture import capture
from tvmbridge.relay.graph import function_text, results_of, write_graph
from tvmbridge.relay.writer import VERSIONS


class RelayText(NamedTuple):
    """A Relay module as text, and the values of the parameters that are weights.

    - ``text``: one function ``@main``, whose parameters are forward's tensors, then weights.
    - ``params``: a copy of each weight, by the name of its parameter.
    """

    text: str
    params: dict[str, np.ndarray[Any, Any]]


def to_relay(
    module: nn.Module | CapturedGraph,
    sample: Any = None,
    *,
    sample_kwargs: Mapping[str, Any] | None = None,
    version: str = "0.17",
) -> RelayText:
    """Return the forward of a module, for inference, as text of Relay with parameters apart.

    Relay was TVM's graph language up to 0.19. Compilers of some accelerators take it.
    ``tvm.relay.fromtext`` (``tvm.parser.fromtext`` up to 0.13) parses the text;
    ``relay.build(mod, target, params=params)`` compiles it.

    Args:
        module: a module in eval mode, or a graph that :func:`tvmbridge.capture` made of one.
        sample: a tensor, or a tuple of positional arguments; None with a captured graph.
        sample_kwargs: keyword arguments of forward.
        version: the version of Relay: ``"0.17"``, ``"0.14"`` or ``"0.11"``.

    Returns:
        The text, and the parameters as arrays of NumPy by name.

    Raises:
        ExportError: Relay cannot say some operators or effects of forward. The message names all of
            them, with the lines of the model.
        CaptureError, UnsupportedOperatorError: the module cannot be captured.

    Example:
        >>> import torch, tvmbridge
        >>> text, params = tvmbridge.to_relay(torch.nn.Linear(4, 2).eval(), torch.zeros(3, 4))
        >>> sorted(params)
        ['bias', 'weight']
    """
    if version not in VERSIONS:
        raise ValueError(f"version is {version!r}; choose one of {', '.join(VERSIONS)}")
    if isinstance(module, CapturedGraph):
        _refuse_training(module)
        return _written(module, version)
    with torch.no_grad():
        captured = capture(module, sample, sample_kwargs=sample_kwargs, needs_grad=False)
        _refuse_training(captured)
        try:
            return _written(captured, version)
        except ExportError as error:
            # Operators that PyTorch's kernels serve, such as Fourier transforms, in their parts.
            with code_runs_alone():
                captured = capture(module, sample, sample_kwargs=sample_kwargs, needs_grad=False)
            try:
                return _written(captured, version)
            except ExportError:
                raise error from None


def _refuse_training(captured: CapturedGraph) -> None:
    if captured.assumptions.training:
        raise ExportError("the module is in train mode; Relay is for inference: call eval() first")


def _written(captured: CapturedGraph, version: str) -> RelayText:
    ctx = write_graph(captured, version)
    results = results_of(captured)
    if not results:
        raise ExportError("forward returns no tensor")
    text = function_text(ctx, results)
    return RelayText(text, {name: _array(tensor) for name, tensor in ctx.params.items()})


def _array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    return tensor.detach().cpu().numpy().copy()
