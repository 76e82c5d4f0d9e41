"""Whether a trace with symbols is also right where some sizes are 1.

torch.export takes a size of 1 for a constant, because it may broadcast, and assumes that no symbol
is 1. Where a trace with these sizes of 1 has the same operators, code from the first trace is right
for both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from tvmbridge.core.symbolic_numbers import is_number
from tvmbridge.core.torch_private import OpOverload, pytree
from tvmbridge.graph_capture.any_size import SymbolicTrace
from tvmbridge.graph_capture.resized import NumbersAt, arguments_of

# Operators that are the same where the shape of the result is, given as numbers or as -1.
_RESHAPES = frozenset(
    {
        torch.ops.aten._unsafe_view.default,
        torch.ops.aten.reshape.default,
        torch.ops.aten.view.default,
    }
)
# Operators whose result is their first argument, if it has the shape of the result.
_SAME = _RESHAPES | {
    torch.ops.aten.clone.default,
    torch.ops.aten.alias.default,
    torch.ops.aten.expand.default,
    torch.ops.aten.slice.Tensor,
}


def compute_alike(
    symbolic: SymbolicTrace, ones: SymbolicTrace, shapes: Sequence[Mapping[int, Sequence[int]]]
) -> bool:
    """Whether both traces of a module have the same operators for arguments of each of ``shapes``.

    Args:
        ones: the trace in which the sizes that are 1 in ``shapes`` are constants.
    """
    if not (symbolic.has_dense_results and ones.has_dense_results):
        return False
    first, other = symbolic.stage, ones.stage
    seen, here = first.observation, other.observation
    assert seen is not None
    assert here is not None
    if not (here.values.keys() <= seen.values.keys() and here.asks <= seen.asks):
        return False
    if {o.label for o in here.outside} - {o.label for o in seen.outside}:
        return False
    if first.is_compiling != other.is_compiling or here.left != seen.left:
        return False
    if here.sharing.aliases != seen.sharing.aliases:
        return False
    programs = symbolic.program, ones.program
    kinds = [[type(s.arg) for s in p.graph_signature.output_specs] for p in programs]
    if kinds[0] != kinds[1]:
        return False
    for each in shapes:
        if not symbolic.relations.same_extremes(each):
            return False
        known = symbolic.relations.symbols(each)
        if _becomes_empty(symbolic.program, known):
            return False
        operators = described_at(ones.program, ones.relations.symbols(each))
        if described_at(symbolic.program, known) != operators:
            return False
    return True


def _becomes_empty(program: ExportedProgram, symbols: Mapping[Any, int]) -> bool:
    """Whether a symbolic size is 0; code is for sizes from 1 on.

    A size of 0 that is no symbol is one at all sizes: the statistics that a batch norm in eval mode
    returns are empty.
    """
    sizes = NumbersAt(symbols)
    return any(
        isinstance(size, torch.SymInt) and sizes.of(size) == 0
        for node in program.graph.nodes
        for value in pytree.tree_leaves(node.meta.get("val"))
        if isinstance(value, torch.Tensor)
        for size in value.shape
    )


def described_at(program: ExportedProgram, symbols: Mapping[Any, int]) -> list[Any]:
    """Return the operators of a program with their arguments and the shapes of their results."""
    sizes, numbers = NumbersAt(symbols), dict[fx.Node, int]()
    found: list[Any] = []

    def argument(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return repr(sizes.of(value.meta["val"])) if is_number(value) else f"%{numbers[value]}"
        return repr(sizes.of(value))

    for node in program.graph.nodes:
        if is_number(node):
            continue
        values = pytree.tree_leaves(node.meta.get("val"))
        made = [_shape(value, sizes) for value in values]
        if node.target in _SAME:
            source = node.args[0]
            if [_shape(source.meta["val"], sizes)] == made:
                numbers[node] = numbers[source]
                continue
        numbers[node] = len(found)
        if node.target in _RESHAPES:
            found.append(("reshape", argument(node.args[0]), made))
            continue
        given, named = pytree.tree_map(argument, arguments_of(node))
        if isinstance(node.target, OpOverload):
            given = _without_defaults(node.target, given)
        target = "" if node.op in ("placeholder", "output") else str(node.target)
        found.append((node.op, target, given, named, made))
    return found


def _without_defaults(operator: OpOverload, given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Leave out the last arguments that have their default values, as a step of 1 has.

    Args:
        given: the arguments as texts.
    """
    parameters = operator._schema.arguments
    while given and given[-1] == repr(parameters[len(given) - 1].default_value):
        given = given[:-1]
    return given


def _shape(value: Any, sizes: NumbersAt) -> Any:
    if not isinstance(value, torch.Tensor):
        return None
    return tuple(map(sizes.of, value.shape)), value.dtype, value.device
