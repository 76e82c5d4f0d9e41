"""Pack weights that products read as right operands by the width of a tile.

Before::

    def forward(x, w):  # w: (768, 3072)
        lv = R.matmul(x, w)

After::

    def forward(x, w):  # w: (96, 768, 32)
        lv = R.call_tir(product, (x, w), out_ty=R.Tensor((14, 3072), "float32"))

Requires: static shapes. Guarantees: the results. The caller passes the weights packed by
:func:`packed_weight`. Runs after: LiftFrozen. Runs before: ProductsInLoops.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import prod

import torch
import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator
from tvm.relax.utils import copy_with_new_vars

from tvmbridge.kernels.product_form import Form
from tvmbridge.passes.base import PassReport, RelaxPass, bindings_of, dtype_of, is_call, shape_of
from tvmbridge.schedules.machine import Machine
from tvmbridge.schedules.product_tiles import width_of
from tvmbridge.schedules.products import panels_shape, product_of_panels

# Products of fewer multiplications for each row stay, so that they are fused with their neighbours.
_WORTH_PACKING = 1 << 12


@dataclass(frozen=True)
class PackWeights(RelaxPass):
    """Change parameters of ``forward`` that are right operands of products to packed ones.

    Args:
        machine: the processor that the loops are for.
        weights: the names of the parameters that are weights.
    """

    machine: Machine
    weights: tuple[str, ...]

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        forward = mod["forward"]
        found = _packable(forward, self.weights, self.machine)
        if not found:
            return mod
        rewriter = _Packer(
            mod, self.machine, {p: _packed_parameter(p, self.machine) for p in found}
        )
        body = rewriter.visit_expr(forward.body)
        parameters = [rewriter.packed.get(p, p) for p in forward.params]
        new = relax.Function(
            parameters, body, forward.ret_ty, forward.is_pure, forward.attrs, forward.span
        )
        mod = rewriter.builder_.get()
        mod.update_func(mod.get_global_var("forward"), copy_with_new_vars(new))
        report.rewrote(len(found))
        return mod


def packed_parameters(before: relax.Function, after: relax.Function) -> frozenset[int]:
    """Return the places of the parameters that the pass packed."""
    pairs = zip(before.params, after.params, strict=True)
    return frozenset(
        place for place, (old, new) in enumerate(pairs) if shape_of(old) != shape_of(new)
    )


def packed_weight(weight: torch.Tensor, machine: Machine) -> torch.Tensor:
    """Return a matrix as panels of its columns; the last panel has the last columns."""
    width, columns = width_of(machine), weight.shape[1]
    starts = range(0, columns - width, width)
    panels = [weight[:, start : start + width] for start in (*starts, columns - width)]
    return torch.stack(panels)


def _packable(
    forward: relax.Function, weights: Collection[str], machine: Machine
) -> set[relax.Var]:
    """Return the weights that nothing but products reads, as right operands."""
    wanted = {p for p in forward.params if p.name in weights and _is_large(p, machine)}
    for value in (*bindings_of(forward).values(), forward.body.body):
        read = set(relax.analysis.free_vars(value)) & wanted
        if read and not _is_product(value):
            wanted -= read
        elif read:
            wanted -= set(relax.analysis.free_vars(value.args[0]))
    return wanted


def _is_large(parameter: relax.Var, machine: Machine) -> bool:
    shape = shape_of(parameter)
    if shape is None or len(shape) != 2 or dtype_of(parameter) != "float32":
        return False
    return shape[1] >= width_of(machine) and prod(shape) >= _WORTH_PACKING


def _is_product(value: relax.Expr) -> bool:
    if not is_call(value, "relax.matmul"):
        return False
    left = value.args[0]
    shape = shape_of(left)
    return dtype_of(left) == "float32" and shape is not None and len(shape) > 1 and prod(shape) > 0


def _form(rows: int, shape: tuple[int, ...]) -> Form:
    return Form(rows, shape[1], shape[0])


def _packed_parameter(parameter: relax.Var, machine: Machine) -> relax.Var:
    shape = panels_shape(_form(1, shape_of(parameter) or ()), machine)
    return relax.Var(parameter.name, relax.TensorType(shape, "float32"))


@mutator
class _Packer(PyExprMutator):
    def __init__(
        self, mod: tvm.IRModule, machine: Machine, packed: dict[relax.Var, relax.Var]
    ) -> None:
        super().__init__(mod)
        self.machine, self.packed = machine, packed

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        weight = call.args[1] if len(call.args) == 2 else None
        if weight not in self.packed or not _is_product(call):
            return super().visit_call_(call)
        left = self.visit_expr(call.args[0])
        shape, result = shape_of(call.args[0]) or (), shape_of(call) or ()
        form = _form(prod(shape[:-1]), shape_of(weight) or ())
        rows = (form.rows, form.depth)
        if shape != rows:
            left = self.builder_.emit(relax.op.reshape(left, rows))
        callee = self.builder_.add_func(product_of_panels(form, self.machine), "product")
        product = self.builder_.emit(
            relax.call_tir(
                callee,
                [left, self.packed[weight]],
                relax.TensorType((form.rows, form.columns), "float32"),
            )
        )
        if result == (form.rows, form.columns):
            return product
        return relax.op.reshape(product, result)
