"""Legalize equal calls once: a model of equal layers repeats each of its calls many times.

A legalization builds a tensor expression and a TIR function, and then TVM finds that the module has
this function already. That takes a millisecond a call; looking the call up takes microseconds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tvm_ffi
from tvm import ir, relax
from tvm.ir import Call, Expr, GenericConst
from tvm.relax.transform.legalize_ops.common import LegalizeFunc

from tvmbridge.legalize import LEGALIZE_MAP

# A call of a TIR function, and the positions of the operands that it takes. None if calls with the
# key are legalized each time.
_Found = tuple[Call, tuple[int, ...]] | None


def legalize_map() -> dict[str, LegalizeFunc]:
    """Return ``LEGALIZE_MAP`` and TVM's own legalizations, which remember calls of one module."""
    return {name: _remembering(function) for name, function in _all().items()}


def _all() -> dict[str, LegalizeFunc]:
    return {**_upstream(), **LEGALIZE_MAP}


@functools.cache
def _upstream() -> dict[str, LegalizeFunc]:
    names = [name for name in ir.Op.list_op_names() if name.startswith("relax.")]
    found = ((name, ir.Op.get(name).get_attr("FLegalize")) for name in names)
    return {name: function for name, function in found if function is not None}


def _remembering(legalize: LegalizeFunc) -> Callable[[relax.BlockBuilder, Call], Expr]:
    known: dict[Any, _Found] = {}

    def legalize_once(bb: relax.BlockBuilder, call: Call) -> Expr:
        operands = _operands(call)
        key = _key(call, operands)
        found = None if key is None else known.get(key)
        if found is not None:
            loops, positions = found
            taken = relax.Tuple([operands[i] for i in positions])
            return relax.Call(loops.op, [loops.args[0], taken], loops.attrs, loops.ty_args)
        legalized = legalize(bb, call)
        if key is not None and key not in known:
            known[key] = _loops(legalized, operands)
        return legalized

    return legalize_once


def _operands(call: Call) -> list[Expr]:
    """Return the operands of ``call``, with the fields of tuples one by one."""
    return [
        operand
        for arg in call.args
        for operand in (arg.fields if isinstance(arg, relax.Tuple) else (arg,))
    ]


def _key(call: Call, operands: list[Expr]) -> Any:
    """Return a key of everything that the legalization of ``call`` may depend on.

    It has the types of variables, which variables are the same, and the values of other operands.
    None if an operand is a constant with dimensions, or a variable that is no tensor.
    """
    variables: dict[Expr, int] = {}
    seen: list[Any] = []
    for operand in operands:
        if isinstance(operand, relax.Var):
            if not isinstance(operand.ty, relax.TensorType):
                return None
            seen += [operand.ty, variables.setdefault(operand, len(variables))]
        elif isinstance(operand, GenericConst) and operand.value.shape:
            return None
        else:
            seen.append(operand)
    tuples = [len(a.fields) if isinstance(a, relax.Tuple) else -1 for a in call.args]
    parts = [call.op, call.attrs, call.ty, tvm_ffi.Array(call.ty_args), tvm_ffi.Array(tuples)]
    return tvm_ffi.StructuralKey(tvm_ffi.Array([*parts, *seen]))


def _loops(legalized: Expr, operands: list[Expr]) -> _Found:
    """Return what to repeat for an equal call; None unless ``legalized`` calls a TIR function.

    All arguments of that call must be among ``operands``.
    """
    if getattr(getattr(legalized, "op", None), "name", "") != "relax.call_tir":
        return None
    if len(legalized.args) != 2:
        return None
    positions = []
    for taken in legalized.args[1].fields:
        same = (i for i, operand in enumerate(operands) if operand.same_as(taken))
        position = next(same, None)
        if position is None:
            return None
        positions.append(position)
    return legalized, tuple(positions)
