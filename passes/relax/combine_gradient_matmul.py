"""Gradients of combined products are combined: one product for the input, one for the weights.

Before, for ``y_i = x @ permute_dims(w_i)`` with the cotangents ``g_i``::

    d_q = R.matmul(g_q, w_q)                        # (rows, depth)
    d_k = R.matmul(g_k, w_k)
    dx = R.add(R.add(rest, d_q), d_k)
    dw_q = R.matmul(R.permute_dims(g_q), x)
    dw_k = R.matmul(R.permute_dims(g_k), x)

After::

    g = R.concat((g_q, g_k), axis=1)
    w = R.concat((w_q, w_k), axis=0)
    dx = R.add(rest, R.matmul(g, w))
    dw = R.matmul(R.permute_dims(g), x)
    dw_q, dw_k = R.strided_slice(dw, [0], ...), R.strided_slice(dw, [0], ...)

Bindings that need the combined products are moved behind the last of the cotangents.

Requires: one dataflow block. Guarantees: the same values up to rounding, as the sum over the
products is computed within one product. Runs after: CombineParallelBatchMatmul on the joint
function. Runs before: LiftPackedWeights, which takes the concatenated weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from tvmbridge.passes.base import PassReport, RelaxPass, dtype_of, map_functions, shape_of
from tvmbridge.passes.relax.gradient_products import Flow, GradientGraph, Sum
from tvmbridge.passes.relax.parallel_products import ParallelProducts

Refusal = Callable[[ParallelProducts], str | None]


@dataclass(frozen=True)
class CombineGradientMatmul(RelaxPass):
    """Combine the products by which gradients flow back through combined products.

    Args:
        groups: for each combined product, the names of the parameters that are its weights.
        input_refusal: called with a combined product; returns why combining the gradient of its
            input is not worth it, or None if it is.
        weight_refusal: the same for the gradients of its weights.
    """

    groups: tuple[tuple[str, ...], ...]
    input_refusal: Refusal | None = None
    weight_refusal: Refusal | None = None

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        def rewrite(function: relax.Function) -> relax.Function:
            graph = GradientGraph(function)
            plans = self._plans(graph, report)
            if not plans:
                return function
            return _GradientMutator(plans, graph.operands).visit_expr(function)

        return map_functions(mod, rewrite)

    def _plans(self, graph: GradientGraph, report: PassReport) -> list[_GradientPlan]:
        plans = []
        for names in self.groups:
            label = f"gradients of {', '.join(names)}"
            flows = graph.flows(names)
            if isinstance(flows, str):
                report.decline(label, flows)
                continue
            plan = _GradientPlan(flows)
            description = _description(names, flows)
            for kind, refusal, find in (
                ("input", self.input_refusal, graph.sum_of),
                ("weight", self.weight_refusal, graph.stack_of),
            ):
                found = find(flows)
                reason = found if isinstance(found, str) else refusal and refusal(description)
                if reason:
                    report.decline(f"{kind} {label}", str(reason))
                else:
                    setattr(plan, kind, found)
                    report.rewrote()
            if plan.input or plan.weight:
                plans.append(plan)
        return plans


@dataclass
class _GradientPlan:
    flows: list[Flow]
    input: Sum | None = None
    weight: dict[relax.Var, relax.Expr] = field(default_factory=dict)
    cotangent: relax.Var | None = None


def _description(names: tuple[str, ...], flows: Sequence[Flow]) -> ParallelProducts:
    rows, _ = shape_of(flows[0].cotangent) or (0, 0)
    _, depth = shape_of(flows[0].weight) or (0, 0)
    widths = tuple(f.width for f in flows)
    return ParallelProducts(names, (rows, depth), (), widths, True, dtype_of(flows[0].var))


@mutator
class _GradientMutator(PyExprMutator):
    def __init__(
        self,
        plans: Sequence[_GradientPlan],
        operands: Mapping[relax.Var, Sequence[relax.Var]],
    ) -> None:
        super().__init__()
        self.operands = operands
        self.sums = {p.input.root: p for p in plans if p.input is not None}
        self.stacks = {var: p for p in plans for var in p.weight}
        self.parts: dict[relax.Var, relax.Expr] = {}
        self.waiting: dict[relax.Var, relax.VarBinding] = {}
        self.seen: set[relax.Var] = set()
        self.replacement: relax.Expr | None = None

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        var = binding.var
        plan = self.stacks.get(var)
        if plan is not None:
            self.seen.add(var)
            self.waiting[var] = binding
            if self.seen.issuperset(plan.weight):
                self._emit_parts(plan)
                self._release()
        elif self._waits(var):
            self.waiting[var] = binding
        else:
            self._bind(binding)

    def _release(self) -> None:
        """Emit the waiting bindings that read no variable that is still to be bound."""
        waiting, self.waiting = self.waiting, {}
        for var, binding in waiting.items():
            if var in self.parts or not (var in self.stacks or self._waits(var)):
                self._bind(binding)
            else:
                self.waiting[var] = binding

    def _waits(self, var: relax.Var) -> bool:
        """Whether the value of ``var`` reads a variable that is still to be bound."""
        return bool(self.waiting) and any(v in self.waiting for v in self.operands[var])

    def _bind(self, binding: relax.VarBinding) -> None:
        plan = self.sums.get(binding.var)
        if plan is not None:
            self.replacement = self._sum(plan, binding)
        else:
            self.replacement = self.parts.get(binding.var)
        super().visit_var_binding_(binding)

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        if self.replacement is None:
            return super().visit_call_(call)
        replacement, self.replacement = self.replacement, None
        return replacement

    def _cotangent(self, plan: _GradientPlan) -> relax.Var:
        if plan.cotangent is None:
            parts = [self.visit_expr(f.cotangent) for f in plan.flows]
            plan.cotangent = self.builder_.emit(relax.op.concat(parts, 1))
        return plan.cotangent

    def _sum(self, plan: _GradientPlan, binding: relax.VarBinding) -> relax.Expr:
        assert plan.input is not None
        emit = self.builder_.emit
        weights = emit(relax.op.concat([f.weight for f in plan.flows], 0))
        total = emit(relax.op.matmul(self._cotangent(plan), weights))
        if shape_of(total) != shape_of(binding.var):
            total = emit(relax.op.reshape(total, shape_of(binding.var)))
        for number, other in enumerate(plan.input.others, start=1):
            total = relax.op.add(self.visit_expr(other), total)
            if number < len(plan.input.others):
                total = emit(total)
        return total

    def _emit_parts(self, plan: _GradientPlan) -> None:
        emit = self.builder_.emit
        cotangent = emit(relax.op.permute_dims(self._cotangent(plan), [1, 0]))
        (common, *_) = plan.weight.values()
        total = emit(relax.op.matmul(cotangent, self.visit_expr(common)))
        begin = 0
        for flow, var in zip(plan.flows, plan.weight, strict=True):
            self.parts[var] = relax.op.strided_slice(
                total, axes=[0], begin=[begin], end=[begin + flow.width]
            )
            begin += flow.width
