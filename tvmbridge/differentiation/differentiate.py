"""Differentiate a forward module into the joint function of forward and backward.

The joint function is ``joint(primals..., cotangents...) -> (outputs..., gradients...)``. Its
results are one flat tuple, and its body is one dataflow block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tvm
from tvm import relax

from tvmbridge.core.admission import note_use
from tvmbridge.core.errors import UnsupportedOperatorError
from tvmbridge.core.types import PassRecord
from tvmbridge.differentiation.custom_functions import AppliedFunction
from tvmbridge.differentiation.saved import SavedMemory
from tvmbridge.gradients import dtypes_of, install_rules, is_admitted, rule_name
from tvmbridge.passes.base import bindings_of, dtype_of, flat_results, free_prefix
from tvmbridge.passes.relax.append_cotangents import COTANGENT_PREFIX, AppendCotangents
from tvmbridge.passes.relax.stop_gradients import StopGradients, active_variables, is_floating
from tvmbridge.pipeline import lowering_passes, run_passes, zapp_passes


@dataclass(frozen=True)
class JointModule:
    """A joint function with its calling convention.

    ``mod["joint"]`` takes the primals, then the cotangents. It returns ``num_outputs`` outputs of
    forward, then one gradient for each of ``wanted``.

    - ``primals``, ``cotangents``: the names of the parameters.
    - ``cotangent_of``: for each cotangent, the number of its output.
    - ``gradient_reads``: for each gradient, a set of cotangents by their numbers. In eager PyTorch
      the gradient is None unless at least one of them arrives. None: the cotangents that the
      gradient is computed from.
    - ``drawn``: the primals that are random draws.
    - ``functions``: the custom autograd functions, in the order of their boundaries. Without any,
      the gradients are linear in the cotangents, as PyTorch's own formulas are.
    - ``saved``: the primals and outputs that eager PyTorch saves for backward; None: all.
    """

    mod: tvm.IRModule
    primals: tuple[str, ...]
    cotangents: tuple[str, ...]
    cotangent_of: tuple[int, ...]
    num_outputs: int
    wanted: tuple[str, ...]
    gradient_reads: tuple[frozenset[int], ...] | None = None
    drawn: tuple[str, ...] = ()
    functions: tuple[AppliedFunction, ...] = ()
    saved: SavedMemory | None = None


def missing_rules(mod: tvm.IRModule, wanted: Sequence[str]) -> list[str]:
    """Return the operators of ``main`` on a gradient's path that have no admitted rule."""
    function, named = mod["main"], set(wanted)
    active = active_variables(function, [p for p in function.params if p.name in named])
    missing: dict[str, None] = {}
    for block in function.body.blocks:
        for binding in block.bindings:
            call = binding.value
            if not isinstance(call, relax.Call) or binding.var not in active:
                continue
            if not isinstance(call.op, tvm.ir.Op) or not is_admitted(call):
                missing[rule_name(call) if isinstance(call.op, tvm.ir.Op) else str(call.op)] = None
            else:
                note_use("rules", rule_name(call), dtypes_of(call))
    return list(missing)


def differentiate(
    mod: tvm.IRModule,
    wanted: Sequence[str],
    outputs: Sequence[int],
    records: list[PassRecord],
) -> JointModule:
    """Build the joint function of ``mod["main"]`` by TVM's Gradient.

    Args:
        wanted: names of the parameters of ``main`` that need a gradient.
        outputs: numbers of the outputs that may have a cotangent.

    Raises:
        UnsupportedOperatorError: operators have no gradient rule (the message names all of them),
            a tensor with a gradient is bfloat16, or no output depends on ``wanted``.
    """
    install_rules()
    mod = run_passes(mod, lowering_passes(), records)
    missing = missing_rules(mod, wanted)
    if missing:
        raise UnsupportedOperatorError(
            f"no gradient rule for {', '.join(missing)}; take joint='aot' (or 'auto'), which uses "
            "PyTorch's own derivatives"
        )
    function = mod["main"]
    results = flat_results(function)
    named = set(wanted)
    active = active_variables(function, [p for p in function.params if p.name in named])
    halves = [v for v in active if isinstance(v.ty, relax.TensorType) and dtype_of(v) == "bfloat16"]
    if halves:
        raise UnsupportedOperatorError(
            f"TVM's Gradient takes no bfloat16, and {min(v.name for v in halves)} has a "
            "gradient; take joint='aot' (or 'auto'), which uses PyTorch's own derivatives"
        )
    differentiable = tuple(i for i in outputs if is_floating(results[i]) and results[i] in active)
    if not differentiable:
        raise UnsupportedOperatorError(
            "no output depends on an input or parameter that requires a gradient"
        )
    prefix = free_prefix(COTANGENT_PREFIX, [p.name for p in function.params])
    append = AppendCotangents(differentiable, prefix)
    mod = run_passes(mod, [StopGradients(tuple(wanted)), append], records)
    joint = _flatten_adjoint(_gradient(mod, wanted, records), len(results))
    cotangents = tuple(f"{prefix}{i}" for i in differentiable)
    joint = run_passes(joint, zapp_passes(cotangents), records)
    return JointModule(
        mod=joint,
        primals=tuple(p.name for p in function.params),
        cotangents=cotangents,
        cotangent_of=differentiable,
        num_outputs=len(results),
        wanted=tuple(wanted),
    )


def _gradient(
    mod: tvm.IRModule, wanted: Sequence[str], records: list[PassRecord]
) -> relax.Function:
    parameters = {p.name: p for p in mod["main"].params}
    gradient = relax.transform.Gradient(
        "main", require_grads=[parameters[name] for name in wanted], target_index=0
    )
    return run_passes(mod, [gradient], records)["main_adjoint"]


def _flatten_adjoint(adjoint: relax.Function, num_outputs: int) -> tvm.IRModule:
    """Flatten the results ``((scalar, outputs...), (gradients...))``, and drop the scalar."""
    bound = bindings_of(adjoint)

    def fields(expr: relax.Expr) -> list[relax.Expr]:
        while isinstance(expr, relax.Var):
            expr = bound[expr]
        assert isinstance(expr, relax.Tuple)
        return list(expr.fields)

    primal, gradients = fields(adjoint.body.body)
    results = [*fields(primal)[1 : 1 + num_outputs], *fields(gradients)]
    builder = relax.BlockBuilder()
    with builder.function("joint", list(adjoint.params)):
        with builder.dataflow():
            for binding in adjoint.body.blocks[0].bindings:
                builder.emit_normalized(binding)
            output = builder.emit_output(relax.Tuple(results))
        builder.emit_func_output(output)
    return builder.get()
