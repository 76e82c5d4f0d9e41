"""A captured program at other sizes, from a trace with symbols.

Before, at size 31, beside the same program with a symbol::

    y = aten.view(x, [62, 8])        y = aten.view(x, [2*s0, 8])

After, at size 5::

    y = aten.view(x, [10, 8])

Tracing a module again for each size takes long. The symbolic trace is used if it agrees with the
concrete trace at one size in operators, arguments and strides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind

from tvmbridge.core.errors import BridgeError
from tvmbridge.core.symbolic_numbers import SYMBOLIC, expression_of, is_number
from tvmbridge.core.torch_private import pytree

_PLAIN: dict[Any, Any] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
_ALIAS = torch.ops.aten.alias.default


class OtherProgramError(BridgeError):
    """The symbolic trace differs from the concrete trace in more than sizes."""


@dataclass(frozen=True)
class NumbersAt:
    """Evaluates the numbers of a symbolic trace for given values of the symbols.

    - ``symbols``: the value of each symbol
    - ``found``: the numbers evaluated so far, by expression and kind
    """

    symbols: Mapping[Any, int]
    found: dict[Any, Any] = field(default_factory=dict)

    def of(self, value: Any) -> Any:
        """Return ``value`` with numbers in place of symbols.

        For a tensor, return shape, strides, dtype and device.
        """
        if isinstance(value, SYMBOLIC):
            return self._number(value.node.expr, type(value))
        if isinstance(value, torch.Tensor):
            shape, stride = (tuple(map(self.of, ns)) for ns in (value.shape, value.stride()))
            return shape, stride, value.dtype, value.device
        return value

    def _number(self, expression: Any, kind: type) -> Any:
        key = expression, kind
        if key not in self.found:
            value = expression.subs(self.symbols)
            if value not in (sympy.true, sympy.false) and not value.is_number:
                raise OtherProgramError(f"{value} is no number")
            self.found[key] = _PLAIN[kind](value)
        return self.found[key]


def resized(
    program: ExportedProgram,
    symbolic: ExportedProgram,
    here: Mapping[Any, int],
    there: Mapping[Any, int],
) -> ExportedProgram:
    """Return ``program``, which was captured for some sizes, for other sizes.

    Args:
        here: the values of the symbols in ``program``.
        there: the values of the symbols in the program that is returned.

    Raises:
        OtherProgramError: ``symbolic`` at the sizes ``here`` differs from ``program``.
    """
    of_sizes = [n for n in symbolic.graph.nodes if not is_number(n) and not _is_whole(n)]
    given = [n for n in program.graph.nodes if n.target is not _ALIAS]
    if len(of_sizes) != len(given):
        raise OtherProgramError("the trace with symbols has more operators, or fewer")
    kinds = [
        [type(o.arg) for o in each.graph_signature.output_specs] for each in (program, symbolic)
    ]
    if kinds[0] != kinds[1]:
        raise OtherProgramError("a result is a size")
    known, wanted = NumbersAt(here), NumbersAt(there)
    graph, partners, made = fx.Graph(), dict[fx.Node, fx.Node](), dict[fx.Node, fx.Node]()
    for node, other in zip(given, of_sizes, strict=True):
        _refuse_other(node, other, known, partners)
        partners[other] = node
        args, kwargs = _arguments(other, wanted, made)
        copied = graph.create_node(node.op, node.target, args, kwargs, node.name, node.type)
        copied.name = node.name  # create_node renames names that Python reserves
        copied.meta = dict(node.meta)
        if "val" in node.meta:
            values = other.meta["val"]
            copied.meta["val"] = _resized_values(node.meta["val"], values, wanted)
        made[other] = copied
    try:
        return ExportedProgram(
            torch.nn.Module(),
            graph,
            program.graph_signature,
            program.state_dict,
            {},
            program.module_call_graph,
            None,
            program.constants,
        )
    except Exception as error:  # torch.export verifies the program
        raise OtherProgramError(f"it is no program: {error}") from error


def outputs_at(symbolic: ExportedProgram, symbols: Mapping[Any, int]) -> list[torch.Tensor | None]:
    """Return forward's results for these symbols, as tensors without data; None for no tensor."""
    sizes = NumbersAt(symbols)
    values = {n.name: n.meta.get("val") for n in symbolic.graph.nodes}
    specs = symbolic.graph_signature.output_specs
    results = [values.get(s.arg.name) for s in specs if s.kind is OutputKind.USER_OUTPUT]
    return [_without_data(v, sizes) if isinstance(v, torch.Tensor) else None for v in results]


def _without_data(value: torch.Tensor, sizes: NumbersAt) -> torch.Tensor:
    shape, stride, dtype, _ = sizes.of(value)
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


def _is_whole(node: fx.Node) -> bool:
    """Whether a node slices all elements, where a trace without symbols has an alias or nothing."""
    if node.target is _ALIAS:
        return True
    if node.target is not torch.ops.aten.slice.Tensor or len(node.args) > 4:
        return False
    given = node.all_input_nodes[0]
    part, whole = ([expression_of(n) for n in x.meta["val"].shape] for x in (node, given))
    return part == whole


def _refuse_other(
    node: fx.Node, other: fx.Node, known: NumbersAt, partners: Mapping[fx.Node, fx.Node]
) -> None:
    """Raise OtherProgramError unless ``other`` at the sizes ``known`` equals ``node``."""
    if node.op == "get_attr" or node.op != other.op:
        raise OtherProgramError(f"{other.op} stands for {node.op} {node.name}")
    if node.op != "output" and node.op != "placeholder" and node.target != other.target:
        raise OtherProgramError(f"{other.target} stands for {node.target}")
    arguments = _arguments(other, known, partners)
    given = pytree.tree_map(_without_alias, (node.args, node.kwargs))
    if pytree.tree_map(repr, arguments) != pytree.tree_map(repr, given):
        raise OtherProgramError(f"{node.name} has other arguments with symbols")
    values = [pytree.tree_map(known.of, each.meta.get("val")) for each in (node, other)]
    if values[0] != values[1]:
        raise OtherProgramError(f"{node.name} is {values[1]} with symbols, and not {values[0]}")


def _without_alias(value: Any) -> Any:
    while isinstance(value, fx.Node) and value.target is _ALIAS:
        value = value.args[0]
    return value


def arguments_of(node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a node, with 0 where a slice begins at None.

    A trace with symbols has None there, and a trace without symbols has 0.
    """
    given = node.args
    if node.target is torch.ops.aten.slice.Tensor and len(given) > 2 and given[2] is None:
        given = (*given[:2], 0, *given[3:])
    return given, node.kwargs


def _arguments(node: fx.Node, sizes: NumbersAt, nodes: Mapping[fx.Node, fx.Node]) -> Any:
    return pytree.tree_map(lambda v: _at(v, sizes, nodes), arguments_of(node))


def _at(value: Any, sizes: NumbersAt, nodes: Mapping[fx.Node, fx.Node]) -> Any:
    """Return an argument at concrete sizes; ``nodes`` maps symbolic nodes to concrete ones."""
    if not isinstance(value, fx.Node):
        return sizes.of(value)
    if _is_whole(value):
        return _at(value.args[0], sizes, nodes)
    return sizes.of(value.meta["val"]) if is_number(value) else nodes[value]


def _resized_values(values: Any, symbolic: Any, sizes: NumbersAt) -> Any:
    """Return fake values like ``values``, with the shapes and strides of ``symbolic``."""
    leaves, spec = pytree.tree_flatten(values)
    others = pytree.tree_leaves(symbolic)
    return pytree.tree_unflatten(
        [_resized(v, o, sizes) for v, o in zip(leaves, others, strict=True)], spec
    )


def _resized(value: Any, symbolic: Any, sizes: NumbersAt) -> Any:
    if not isinstance(value, torch.Tensor):
        return sizes.of(symbolic)
    shape, stride, dtype, device = sizes.of(symbolic)
    if (shape, stride) == (tuple(value.shape), value.stride()):
        return value
    mode: Any = value.fake_mode  # type: ignore[attr-defined]
    with mode:
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)
