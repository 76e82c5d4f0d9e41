"""The comparison itself: every stage of the way of the data against eager PyTorch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tvmbridge.core.options import CompileOptions
from tvmbridge.graph_capture.capture import normalize_sample
from tvmbridge.inspect.compare.comparison import STAGES, Comparison
from tvmbridge.inspect.compare.report import ComparisonReport
from tvmbridge.inspect.compare.sample import Sample
from tvmbridge.pipeline import AnyPass


def compare(
    module: nn.Module,
    sample_input: Any,
    *,
    sample_kwargs: Mapping[str, Any] | None = None,
    backward: bool = True,
    stages: Collection[str] | None = None,
    options: CompileOptions | dict[str, Any] | None = None,
    passes: Sequence[AnyPass] = (),
) -> ComparisonReport:
    """Compare what each stage of compilation computes with eager PyTorch.

    The module runs in eager PyTorch, as captured program, as Relax as it is imported and after
    each pass that changes it, and as compiled code: each in its own dtype and in float64, with the
    same numbers. :mod:`tvmbridge.inspect.compare.verdict` says how departures are judged.
    The random numbers are those that the module would draw now; the module, its buffers, its
    gradients and the state of the generator are left as they are.

    Args:
        module: any module, in the mode that it is to be compared in.
        sample_input: a tensor, or a tuple of positional arguments; inputs whose gradients are to
            be compared require one.
        sample_kwargs: keyword arguments of forward.
        backward: compare gradients too, of every parameter and input that requires one.
        stages: which of ``"eager"``, ``"captured"``, ``"imported"``, ``"passes"`` and
            ``"compiled"`` are evaluated; all by default. Eager PyTorch, the reference, always is.
        options: how the module is compiled.
        passes: passes of your own (:class:`tvmbridge.passes.base.RelaxPass`, or any function of an
            IRModule), run behind the pipeline's; each is a stage by its name.

    Returns:
        The report. A module that cannot be compared has one with the reason, and ``ok`` False.

    Raises:
        TypeError: ``module`` is no module, or ``options`` has an unknown field.
        ValueError: ``stages`` has a name that is none.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, not {type(module).__name__}")
    unknown = set(STAGES if stages is None else stages) - set(STAGES)
    if unknown:
        raise ValueError(
            f"no stage is called {', '.join(sorted(unknown))}; choose among {', '.join(STAGES)}"
        )
    chosen = CompileOptions.of(options)
    args, kwargs = normalize_sample(sample_input, sample_kwargs)
    with torch.random.fork_rng(devices=[]):
        try:
            sample = Sample.of(module, args, kwargs)
        except Exception as error:
            return ComparisonReport.refused(f"the module cannot be copied: {error}")
        return Comparison(sample, backward, frozenset(stages or STAGES), chosen, passes).run()
