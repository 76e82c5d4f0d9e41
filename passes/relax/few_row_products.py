"""A float32 product of few rows with a transposed matrix becomes a GPU kernel of tvmbridge.

Before::

    lv = R.permute_dims(w, axes=[1, 0])
    lv1 = R.matmul(x, lv)

After::

    lv1 = R.call_tir(few_row_product, (x, w), out_ty=R.Tensor((14, 768), "float32"))

Requires: products of matrices have been reshaped to two dimensions, if possible. Guarantees:
products that the kernel does not fit (``schedules/gpu/few_rows.py``) are untouched. All products
are untouched if the user lets PyTorch multiply in TF32 or bfloat16, as its libraries are as fast
then.
Runs after: the split into forward and backward. Runs before: DispatchKernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm import relax

from tvmbridge.core.kernel_settings import reduced_precisions
from tvmbridge.passes.base import (
    PassReport,
    RelaxPass,
    dtype_of,
    is_call,
    map_calls,
    shape_of,
    transposed_of,
)
from tvmbridge.schedules.gpu.few_rows import few_row_product, fits


@dataclass(frozen=True)
class FewRowProducts(RelaxPass):
    """Replace float32 products of few rows with a transposed matrix by a kernel of tvmbridge."""

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        reduced = dict(reduced_precisions()).get("CUDA")
        if reduced is not None:
            report.decline("matmul", f"the precision of float32 products is {reduced}")
            return mod

        def rewrite(call: relax.Call, builder: relax.BlockBuilder) -> relax.Expr:
            call = builder.normalize(call)
            if not is_call(call, "relax.matmul") or dtype_of(call) != "float32":
                return call
            x, transposed = call.args
            w = transposed_of(transposed, builder.lookup_binding)
            shape = shape_of(x)
            if w is None or dtype_of(x) != "float32" or shape is None or len(shape) != 2:
                return call
            rows, depth = shape
            columns = (shape_of(w) or ())[0]
            if not fits(rows, columns, depth):
                return call
            report.rewrote()
            product = builder.add_func(few_row_product(rows, columns, depth), "few_row_product")
            return relax.call_tir(product, [x, w], relax.TensorType([rows, columns], "float32"))

        return map_calls(mod, rewrite, report)
