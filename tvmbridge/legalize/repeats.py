"""Calls that are alike are legalised once: a model of equal layers repeats each many times.

A legalisation builds a tensor expression, turns it into a function of loops, and TVM finds that the
module has this function already. That takes a millisecond a call; to find the call itself takes
some microseconds.
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

# A call of loops, and which operands it takes (by position); None: it is legalised each time.
_Found = tuple[Call, tuple[int, ...]] | None


def legalize_map() -> dict[str, LegalizeFunc]:
    """``LEGALIZE_MAP`` and TVM's own legalisations, for one module: they remember its functions."""
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
    """The operands of ``call``; those in tuples one by one."""
    return [
        operand
        for arg in call.args
        for operand in (arg.fields if isinstance(arg, relax.Tuple) else (arg,))
    ]


def _key(call: Call, operands: list[Expr]) -> Any:
    """What a legalisation may depend on; None where that is a large constant or no tensor.

    Of variables these are the types, and which of them are the same; of other operands the values.
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
    """What is repeated for the same key, if ``legalized`` calls loops on some of ``operands``."""
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
