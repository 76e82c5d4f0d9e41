"""The public functions of the fx passes: optimize a module, inspect the result, and undo it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import fx, nn

from tvmbridge.core.contents import MISSING
from tvmbridge.core.options import check_fx_passes
from tvmbridge.core.types import PassRecord
from tvmbridge.fx.forward import GraphCode
from tvmbridge.fx.rewriting import Rewriting
from tvmbridge.graph_capture.capture import normalize_sample
from tvmbridge.passes.fx.combine_sparse_inputs import CombineSparseInputs
from tvmbridge.passes.fx.feature_fusion import FeatureFusion
from tvmbridge.passes.fx.horizontal_fusion import HorizontalFusion
from tvmbridge.passes.fx.overlap_communication import OverlapCommunication
from tvmbridge.passes.fx.run import lines_of
from tvmbridge.runtime.dispatcher import Dispatcher, code_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FxReport:
    """A report of the passes in each mode of a module, and of how its calls were served.

    - ``calls``: the number of calls that rewritten graphs served.
    - ``fallbacks``: the number of calls that the module's own forward served, by reason.
    - ``records``: the records of the passes, by mode; empty for a mode in which tracing was
      refused.
    """

    calls: int
    fallbacks: Mapping[str, int] = field(default_factory=dict)
    records: Mapping[str, tuple[PassRecord, ...]] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{self.calls} calls of rewritten graphs"]
        lines += [f"{n} calls of the module's own forward: {r}" for r, n in self.fallbacks.items()]
        for mode, records in self.records.items():
            lines += [f"{mode}: {line}" for each in records for line in lines_of(each)]
        return "\n".join(lines)


def fx_passes() -> tuple[Any, ...]:
    """Return the passes of ``optimize_fx`` in their order.

    ``OverlapCommunication`` is the last of them, if several processes share a process group.
    """
    passes: tuple[Any, ...] = (CombineSparseInputs(), FeatureFusion(), HorizontalFusion())
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        passes += (OverlapCommunication(),)
    return passes


def optimize_fx(
    module: nn.Module,
    sample_input: Any = MISSING,
    passes: Sequence[Any] | None = None,
    *,
    sample_kwargs: Mapping[str, Any] | None = None,
    measure: bool = True,
) -> nn.Module:
    """Run, in eager PyTorch, a graph of ``module``'s forward that fx passes have rewritten.

    The graph is traced now for the current mode, and at the first call in the other mode. It also
    serves calls of other sizes. Calls that no graph fits run the module's own forward, and
    :func:`fx_report` counts them. Parameters, buffers, ``state_dict`` and hooks stay as they are.
    Gradients flow, and dropout draws the same random numbers as before.

    Args:
        module: the module. Only its ``forward`` is replaced, and only if a pass has rewritten
            something. If none has, the log (``INFO``) and :func:`tvmbridge.explain` say why.
        sample_input: a tensor, or a tuple of positional arguments (nested structures allowed).
        passes: instances of :class:`tvmbridge.passes.fx.base.FxPass`, run in order; None: the
            passes of :func:`fx_passes`.
        sample_kwargs: keyword arguments of forward.
        measure: whether to undo a pass after which the sample takes longer. Graphs that communicate
            with other processes are not measured.

    Returns:
        ``module``.

    Raises:
        TypeError: ``module`` is no module, or an element of ``passes`` is no pass.
        CaptureError: the module cannot be traced, or each call has an effect that a graph would not
            repeat. The message names the cause, and the module is unchanged.
        PassError: a pass failed, or its graph computes other values than the module.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, not {type(module).__name__}")
    chosen = fx_passes() if passes is None else tuple(passes)
    check_fx_passes(chosen, "optimize_fx")
    args, kwargs = normalize_sample(() if sample_input is MISSING else sample_input, sample_kwargs)
    installed = module.__dict__.get("forward")
    earlier = code_of(installed, GraphCode)
    code = GraphCode(module, earlier.own if earlier else installed, Rewriting(chosen, measure))
    code.add(args, kwargs)
    (entries,) = code.entries.values()
    for line in (line for each in entries[0].records for line in lines_of(each)):
        logger.info("%s: %s", type(module).__name__, line)
    if any(each.rewrites for each in entries[0].records):
        module.__dict__["forward"] = Dispatcher(code)
    elif earlier is not None:
        remove_fx(module)
    return module


def _code_of(module: nn.Module) -> GraphCode:
    forward = module.__dict__.get("forward") if isinstance(module, nn.Module) else None
    code = code_of(forward, GraphCode)
    if code is None:
        raise ValueError(f"no fx pass has rewritten this {type(module).__name__}")
    return code


def remove_fx(module: nn.Module) -> nn.Module:
    """Restore the forward that ``module`` had before :func:`optimize_fx`.

    Raises:
        ValueError: no graph is installed.
    """
    code = _code_of(module)
    if code.own is None:
        del module.__dict__["forward"]
    else:
        module.__dict__["forward"] = code.own
    return module


def fx_graphs(module: nn.Module) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return the graph of ``module`` before the passes and after them, of the mode traced last.

    ``tvmbridge.visualize`` draws the two graphs.

    Raises:
        ValueError: no graph is installed.
    """
    entries = list(_code_of(module).entries.values())[-1]
    return entries[0].original, entries[0].graph_module


def fx_report(module: nn.Module) -> FxReport:
    """Return a report of the rewritten graphs of ``module`` and of the calls that they served.

    Raises:
        ValueError: no graph is installed.
    """
    code = _code_of(module)
    entries = [(mode, e) for mode, each in code.entries.items() for e in each]
    records = {str(mode): entry.records for mode, entry in entries}
    records |= {str(mode): () for mode in code.refused}
    return FxReport(code.served(), dict(code.tally.counts), records)
