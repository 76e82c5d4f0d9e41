"""Analyze the expression of a stage: its reads, its named values, and whether it vectorizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tvm_ffi
from tvm import tirx
from tvm.ir import Call, Expr, Range, TensorLoad
from tvm.sym import Analyzer

from tvmbridge.schedules import bfloat16

Buffer = Any


@dataclass(frozen=True)
class Axis:
    """An iteration variable of a stage.

    - ``var``: the variable, which is in [0, ``extent``).
    - ``reduce``: whether the axis is reduced.
    """

    var: tirx.Var
    extent: int
    reduce: bool


@dataclass(frozen=True)
class Load:
    """A read of ``buffer[indices]``.

    - ``slot``: the variable that stands for the value in the stage's expressions.
    - ``guarded``: whether the read may be out of bounds unless a choice around it selects it.
    """

    slot: tirx.Var
    buffer: Buffer
    indices: tuple[Expr, ...]
    guarded: bool


class UnsupportedError(Exception):
    """The function is not of the form that the parser supports."""


def require(condition: bool) -> None:
    """Raise UnsupportedError unless ``condition`` holds."""
    if not condition:
        raise UnsupportedError


def mentions(expr: Expr, var: tirx.Var) -> bool:
    """Whether ``var`` occurs in ``expr``."""
    return var in variables(expr)


def substitute(expr: Expr, values: dict[Any, Expr]) -> Expr:
    """Replace variables by expressions."""
    if not values or isinstance(expr, tirx.IntImm):
        return expr
    if isinstance(expr, tirx.Var):  # without a walk, which takes far longer to begin
        return values.get(expr, expr)
    return tvm_ffi.structural_map(expr, (tirx.Var, lambda var: values.get(var, var)))


def fresh_lets(expr: Expr) -> Expr:
    """Rename the variables that ``expr`` binds, so that it may occur twice in one function."""

    def rename(let: tirx.Let) -> tirx.Let:
        var = tirx.Var(let.var.name, str(let.var.ty.dtype))
        return tirx.Let(var, let.value, substitute(let.body, {let.var: var}))

    return tvm_ffi.structural_map(expr, (tirx.Let, rename))


class ExpressionReader:
    """Replaces the reads of an expression by slots, and lifts its Lets out.

    - ``loads``: the reads.
    - ``binds``: the lifted names with their values, in order.
    - ``cost``: the number of expression nodes.
    - ``vectorizable``, ``guards``: as in :class:`.kernel.KernelStage`.
    """

    def __init__(self, axes: tuple[Axis, ...]) -> None:
        self.loads: list[Load] = []
        self.binds: list[tuple[tirx.Var, Expr]] = []
        self.cost = 0
        self.vectorizable = True
        self.guards: tuple[Expr, ...] | None = None
        self._axes = axes
        self._choices = False
        self._analyzer = Analyzer()
        for axis in axes:
            if axis.extent > 0:
                self._analyzer.bind(axis.var, Range(0, axis.extent))

    def read(self, expr: Expr) -> Expr:
        """Return ``expr`` in terms of slots and names; extend :attr:`loads` and :attr:`binds`."""
        # A rewrite that would find nothing is left out: its beginning alone takes long.
        found = _Contents.of(expr)
        self._choices = found.choices
        if found.reads:
            expr = tvm_ffi.structural_map(expr, (TensorLoad, self._load))
        if found.bfloat16:
            expr = bfloat16.widen(expr)
            found = _Contents.of(expr)
        expr = self._finish(expr, found)
        return tvm_ffi.structural_mutate(expr, (tirx.Let, self._lift)) if found.lets else expr

    def uses_in_binds(self, var: tirx.Var) -> bool:
        """Whether the value of any lifted name mentions ``var``."""
        return any(mentions(value, var) for _, value in self.binds)

    def _load(self, load: TensorLoad) -> Expr:
        for seen in self.loads:
            if seen.buffer.same_as(load.source) and all(
                tvm_ffi.structural_equal(a, b)
                for a, b in zip(seen.indices, load.indices, strict=True)
            ):
                return seen.slot
        slot = tirx.Var("v", bfloat16.held_as(str(load.source.dtype)))
        known = {axis.var for axis in self._axes} | {seen.slot for seen in self.loads}
        require(all(variables(index) <= known for index in load.indices))
        guarded = self._choices and not self._inside(load)
        self.loads.append(Load(slot, load.source, tuple(load.indices), guarded))
        return slot

    def _inside(self, load: TensorLoad) -> bool:
        """Whether a read is known to be within the bounds of its buffer."""
        return all(
            self._analyzer.can_prove(index >= 0) and self._analyzer.can_prove(index < extent)
            for index, extent in zip(load.indices, load.source.shape, strict=True)
            if not isinstance(index, tirx.IntImm)
        )

    def _finish(self, expr: Expr, found: _Contents) -> Expr:
        """Turn choices without guarded reads into Selects; record cost and vectorizability."""
        if found.casts_of_bools:
            expr = tvm_ffi.structural_map(expr, (tirx.Cast, _select_number))
        if any(load.guarded for load in self.loads):
            self.vectorizable = False
            expr = tvm_ffi.structural_map(expr, (Call, _below))
            self.guards = _conditions(expr)
        elif found.choices:
            expr = tvm_ffi.structural_map(expr, (Call, _select))

        def count(node: Expr) -> None:
            self.cost += 1
            if isinstance(node, Call) and not is_if(node) and not _is_vectorizable(node):
                self.vectorizable, self.guards = False, None

        tvm_ffi.structural_walk(expr, (Expr, count))
        return expr

    def _lift(self, let: tirx.Let, mutator: Any) -> Expr:
        self.binds.append((let.var, mutator.mutate(let.value)))
        return mutator.mutate(let.body)


@dataclass
class _Contents:
    """What occurs in an expression.

    - ``reads``: a read of a buffer.
    - ``bfloat16``: a value of this dtype.
    - ``choices``: a Select or an ``if_then_else``.
    - ``casts_of_bools``: a cast of a bool.
    - ``lets``: a Let.
    """

    reads: bool = False
    bfloat16: bool = False
    choices: bool = False
    casts_of_bools: bool = False
    lets: bool = False

    @classmethod
    def of(cls, expr: Expr) -> _Contents:
        """Return what occurs in ``expr``."""
        found = cls()
        tvm_ffi.structural_walk(expr, (Expr, found._look))
        return found

    def _look(self, node: Expr) -> None:
        if type(node) in _PLAIN:
            return
        if isinstance(node, TensorLoad):
            self.reads = True
        elif isinstance(node, tirx.Select) or is_if(node):
            self.choices = True
        elif isinstance(node, tirx.Let):
            self.lets = True
        elif isinstance(node, tirx.Cast) and str(node.value.ty.dtype) == "bool":
            self.casts_of_bools = True
        if str(getattr(node.ty, "dtype", "")) == bfloat16.NAME:
            self.bfloat16 = True


# Most nodes are of these classes. Their dtype is bfloat16 only if that of a read or a constant
# below them is.
_PLAIN = frozenset((tirx.Var, tirx.IntImm, tirx.Add, tirx.Sub, tirx.Mul, tirx.Div))


def _conditions(expr: Expr) -> tuple[Expr, ...]:
    """Return the conditions of all choices in ``expr``."""
    found: list[Expr] = []

    def look(node: Expr) -> None:
        if isinstance(node, tirx.Select):
            found.append(node.condition)
        elif is_if(node):
            found.append(node.args[0])

    tvm_ffi.structural_walk(expr, (Expr, look))
    return tuple(found)


def is_if(node: Expr) -> bool:
    """Whether ``node`` is an ``if_then_else``, which evaluates only one of its branches."""
    return isinstance(node, Call) and getattr(node.op, "name", "") == "prim.if_then_else"


def chooses(expr: Expr) -> bool:
    """Whether ``expr`` contains a choice."""
    return _Contents.of(expr).choices


def variables(expr: Expr) -> set[Any]:
    """Return the scalar variables of an expression."""
    found: set[Any] = set()
    if isinstance(expr, tirx.Var):  # without a walk, which takes far longer to begin
        found.add(expr)
    elif not isinstance(expr, tirx.IntImm):
        tvm_ffi.structural_walk(expr, (tirx.Var, found.add))
    return found


def _select(call: Call) -> Expr:
    return tirx.Select(*call.args) if is_if(call) else call


def _below(call: Call) -> Expr:
    """Rewrite ``constant <= index`` to ``index < constant``, the form that TVM can simplify."""
    if not is_if(call) or not isinstance(call.args[0], tirx.LE):
        return call
    condition, chosen, other = call.args
    if not isinstance(condition.a, tirx.IntImm):
        return call
    return tirx.if_then_else(tirx.LT(condition.b, condition.a), other, chosen)


def _select_number(cast: tirx.Cast) -> Expr:
    """Rewrite a cast from bool to integer as a Select.

    TVM's simplifier fails on a cast of a bool vector.
    """
    dtype = str(cast.ty.dtype)
    if str(cast.value.ty.dtype) != "bool" or "float" in dtype:
        return cast
    return tirx.Select(cast.value, tirx.IntImm(dtype, 1), tirx.IntImm(dtype, 0))


def _is_vectorizable(call: Call) -> bool:
    name = getattr(call.op, "name", "")
    if name == "tirx.reinterpret":
        return True
    get = getattr(call.op, "get_attr", None)
    return bool(get and get("TVectorizable"))
