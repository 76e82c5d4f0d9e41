"""Compile code that serves any size of some dimensions and runs without PyTorch.

The module is lowered at a few sample shapes. The resulting functions must differ in numbers alone,
which become expressions of the symbolic sizes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import tvm
from torch import nn

from tvmbridge.calls.standins import without_inference_tensors
from tvmbridge.compiler.build import Fused
from tvmbridge.compiler.freezing import folded
from tvmbridge.compiler.lowering import Known, LoweredModule, lower_module
from tvmbridge.compiler.request import CompileRequest
from tvmbridge.core.alone import code_runs_alone
from tvmbridge.core.decisions import recorded_decisions, repeated_decisions
from tvmbridge.core.errors import CaptureError, ExportError
from tvmbridge.core.libraries import register_containers
from tvmbridge.core.options import CompileOptions
from tvmbridge.core.torch_private import pytree
from tvmbridge.core.turns import compiling
from tvmbridge.core.types import PassRecord
from tvmbridge.exporting.building import prepare_alone
from tvmbridge.exporting.code import (
    AloneCode,
    FrozenGraph,
    described_code,
    frozen_graph,
    refuse_effects,
)
from tvmbridge.exporting.conditions import written_relations
from tvmbridge.exporting.ones import OnesOfExport
from tvmbridge.graph_capture.any_size import SymbolicTrace, shapes_of
from tvmbridge.graph_capture.surroundings import tracing_here, undisturbed
from tvmbridge.passes.relax.lift_frozen import varying_places
from tvmbridge.runtime.any_size import reach
from tvmbridge.symbolic.building import code_for_all
from tvmbridge.symbolic.code import lowered_at_all, traced_for
from tvmbridge.symbolic.declared import DeclaredDimension, declared, symbols_of
from tvmbridge.symbolic.points import Points
from tvmbridge.symbolic.probes import points_within
from tvmbridge.symbolic.reaching import Reach
from tvmbridge.symbolic.related import related
from tvmbridge.symbolic.size import Point
from tvmbridge.symbolic.sizes import DifferentCodeError, Sizes
from tvmbridge.symbolic.symbols import Dimension, LinearSize, Symbols

_FIXED = "leave these dimensions out of dynamic_shapes, and export one file for each of their sizes"
_SMALL = (2, 3, 5, 7)
_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def symbolic_code(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    spec: Any,
    *,
    target: Any,
    options: CompileOptions,
) -> AloneCode:
    """Compile ``module`` for all sizes of the dimensions that ``spec`` names.

    Raises:
        ExportError: an operator or an effect needs PyTorch, or code for some sizes differs in more
            than numbers.
        CaptureError, UnsupportedOperatorError, PassError, BuildError: the stage that failed.
    """
    register_containers(module)
    try:
        return _for_any_size(module, args, kwargs, spec, target, options)
    except DifferentCodeError as error:
        raise ExportError(f"there is no code for any size: {error}; {_FIXED}") from error


def _for_any_size(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    spec: Any,
    target: Any,
    options: CompileOptions,
) -> AloneCode:
    with torch.no_grad(), compiling(), tracing_here(), undisturbed(), code_runs_alone():
        sample: _Arguments = without_inference_tensors((args, dict(kwargs)))
        dimensions = declared(spec, module.forward, *sample)
        symbols = _symbols(dimensions, sample)
        trace = traced_for(module, symbols, sample, needs_grad=False, autocast=())
        symbols = _in_units(symbols, trace, sample)
        bounds = [_bounds_of(group, dimensions, symbols) for group in symbols.dimensions]
        try:
            # A size of 2 may be confused with another 2 in the code; then try larger shapes.
            points = _points(trace, sample, symbols, bounds, from_two=True)
            code, loops_least, sizes = _compiled(
                module, sample, symbols, trace, points, target, options
            )
        except (DifferentCodeError, CaptureError):
            try:
                points = _points(trace, sample, symbols, bounds, from_two=False)
            except CaptureError as error:
                raise ExportError(f"there is no code for any size: {error}; {_FIXED}") from error
            code, loops_least, sizes = _compiled(
                module, sample, symbols, trace, points, target, options
            )
        names = _names(bounds)
        relations = written_relations(trace.relations, symbols, names)
        ones = OnesOfExport(module, sample, symbols, names, trace, points)
        least, conditions = ones.served(loops_least)
        largest = Reach(trace, symbols, sample, points, [b.most for b in bounds]).most(sizes)
    return replace(
        code,
        inputs=_with_symbols(code.inputs, sample, symbols, names),
        symbols=[
            {"name": name, **_described(bound, symbols.form(group[0]), low, most)}
            for name, bound, group, low, most in zip(
                names, bounds, symbols.dimensions, least, largest, strict=True
            )
        ],
        relations=[*relations, *conditions],
        outputs=[{**output, "shape": None} for output in code.outputs],
    )


def _symbols(dimensions: Mapping[Dimension, DeclaredDimension], sample: _Arguments) -> Symbols:
    shapes = [(leaf, tuple(shape)) for leaf, shape in shapes_of(sample).items()]
    symbols = symbols_of(dimensions, [shapes])
    assert symbols is not None, "the spec names a dimension"
    for group in symbols.dimensions:
        if len({symbols.form(d) for d in group}) > 1:
            raise ExportError(
                "dynamic_shapes has sizes made of one Dim in several ways, such as batch and "
                "2 * batch, which exported functions do not take: export the module for fixed "
                "sizes of these dimensions, or compute the longer argument within forward"
            )
    return symbols


def _in_units(symbols: Symbols, trace: SymbolicTrace, sample: _Arguments) -> Symbols:
    """Return the symbols in the units that forward demands, such as 8 for images halved thrice."""
    found = related(symbols, trace.relations, sample, [symbols.point_of(shapes_of(sample))])
    return found if found.dimensions == symbols.dimensions else symbols


def _bounds_of(
    group: Sequence[Dimension], dimensions: Mapping[Dimension, DeclaredDimension], symbols: Symbols
) -> DeclaredDimension:
    """Return the declaration of a group of dimensions, with the bounds of its symbol."""
    form = symbols.form(group[0])
    dims = [dimensions[d] for d in group]
    least = [-(-(d.form.size(d.least) - form.offset) // form.scale) for d in dims]
    most = [(d.form.size(d.most) - form.offset) // form.scale for d in dims if d.most is not None]
    return replace(dims[0], least=max(least), most=min(most, default=None))


def _points(
    trace: SymbolicTrace,
    sample: _Arguments,
    symbols: Symbols,
    bounds: Sequence[DeclaredDimension],
    *,
    from_two: bool,
) -> Points:
    """Return the sample shapes to compile for.

    If ``from_two``, the smallest shape has distinct sizes from 2 on, or the least that the bounds
    allow. Otherwise the smallest shape depends on the sample and the bounds alone.
    """
    here = symbols.point_of(shapes_of(sample))
    seen = [here, *reach(bounds, here)]
    if from_two:
        # All sizes differ: a number in the code could stand for either of two equal sizes.
        small = zip(here, bounds, itertools.cycle(_SMALL))
        seen.append(tuple(min(n, max(s, b.least)) for n, b, s in small))
    least, most = (tuple(map(each, zip(*seen, strict=True))) for each in (min, max))
    names = [str(i) for i in range(len(pytree.tree_leaves(sample)))]
    return points_within(trace, symbols, sample, [least], [here, most], names)


def _compiled(
    module: nn.Module,
    sample: _Arguments,
    symbols: Symbols,
    trace: SymbolicTrace,
    points: Points,
    target: Any,
    options: CompileOptions,
) -> tuple[AloneCode, Point, Sizes]:
    """Return the code, the least values of the symbols for its loops, and its sizes."""
    records: list[PassRecord] = []

    def lower(point: Point, known: Known) -> _Folded:
        args, kwargs = symbols.probe(*sample, point)
        lowered = lower_module(
            CompileRequest(module, args, kwargs, needs_grad=False, target=target, options=options),
            records=records,
            known=known,
        )
        refuse_effects(lowered)
        return _Folded(lowered, folded(lowered, options, records))

    def prepared(mod: tvm.IRModule, target: tvm.target.Target) -> Fused:
        return prepare_alone(mod, target, records)

    found = lowered_at_all(points, trace, partial(symbols.probe, *sample), lower)
    # A value that depends on weights and on a size is computed at each call.
    live = varying_places([each.mod["forward"] for each in found])
    if live is None:
        raise DifferentCodeError("the graphs at different sizes have different operators")
    graphs = _frozen(
        [each.lowered for each in found], partial(frozen_graph, module, live=live), options
    )
    sizes = points.sizes(with_ones=True)
    code = code_for_all(
        [(graph.mod, None) for graph in graphs],
        sizes,
        partial(prepared, target=graphs[0].lowered.target),
        records,
    )
    return described_code(module, graphs[0], code, records), code.least, sizes


@dataclass(frozen=True)
class _Folded:
    """A lowered module, and its functions with batch norm folded."""

    lowered: LoweredModule
    mod: tvm.IRModule


def _frozen(
    lowered: Sequence[LoweredModule],
    freeze: Callable[..., FrozenGraph],
    options: CompileOptions,
) -> list[FrozenGraph]:
    """Return the frozen graphs at all sample shapes, with the decisions of the first."""
    with recorded_decisions() as decisions:
        graphs = [freeze(lowered[0], options, [])]
    for each in lowered[1:]:
        with repeated_decisions(decisions):
            graphs.append(freeze(each, options, []))
    return graphs


def _names(dims: Sequence[DeclaredDimension]) -> list[str]:
    """Return the names of the sizes; those that come from hints are numbered."""
    return [f"s{i}" if dim.is_hint else _sized(dim.name, dim.form) for i, dim in enumerate(dims)]


def _sized(name: str, form: LinearSize) -> str:
    """Return a size of this form as text: ``2*h + 1``."""
    scaled = name if form.scale == 1 else f"{form.scale}*{name}"
    return f"{scaled} + {form.offset}" if form.offset else scaled


def _described(dim: DeclaredDimension, form: LinearSize, least: int, most: int) -> dict[str, int]:
    """Return the sizes that both the code and the spec allow, and the form of these sizes."""
    highest = most if dim.most is None else min(most, dim.most)
    return {
        "least": form.size(max(least, dim.least)),
        "most": form.size(highest),
        "scale": form.scale,
        "offset": form.offset,
    }


def _with_symbols(
    inputs: Sequence[Mapping[str, Any]],
    sample: _Arguments,
    symbols: Symbols,
    names: Sequence[str],
) -> list[dict[str, Any]]:
    """Return the described inputs, with the names of symbols in place of their sizes."""
    leaves = pytree.tree_leaves(sample)
    of_dimension = {
        d: name for name, group in zip(names, symbols.dimensions, strict=True) for d in group
    }
    tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    return [
        {
            **each,
            "shape": [of_dimension.get((leaf, d), n) for d, n in enumerate(each["shape"])],
        }
        for leaf, each in zip(tensors, inputs, strict=True)
    ]
