"""Mistakes in the forward/backward split, the legalization and the schedules."""

from __future__ import annotations

from tests.planted.plant import Plant

_LEGALIZE = "tests/legalize"

COMPILED_CODE = (
    Plant(
        "residuals swapped",
        "split",
        "tvmbridge.compiler.split",
        "inputs = [*reads, *kept, *residuals, *cotangents]",
        "inputs = [*reads, *kept, *reversed(residuals), *cotangents]",
        (
            "tests/compiler/test_split.py",
            "tests/compiler/test_residual_policies.py",
            "-k",
            "joint_function or steps",
        ),
    ),
    Plant(
        "a kept output mistaken for another",
        "split",
        "tvmbridge.compiler.split",
        "kept[residual] = owner[root]",
        "kept[residual] = min(owner.values())",
        ("tests/compiler/test_split.py", "tests/compiler/test_residual_policies.py"),
    ),
    Plant(
        "a fragile value computed again",
        "split",
        "tvmbridge.coloring.graph",
        "decides = var not in self._held and not operators.is_smooth(value)",
        "decides = False",
        ("tests/coloring/test_random_graphs.py",),
    ),
    Plant(
        "cotangents of a gradient forgotten",
        "split",
        "tvmbridge.compiler.split",
        "reads[binding.var] = none.union(*(reads.get(v, none) for v in operands))",
        "reads[binding.var] = none",
        ("tests/compiler/test_split.py",),
    ),
    Plant(
        "an axis left out of a reduction",
        "kernels",
        "tvmbridge.legalize.reductions",
        "return sorted(int(axis) % ndim for axis in axes)",
        "return sorted(int(axis) % ndim for axis in axes)[:1]",
        (f"{_LEGALIZE}/test_reductions.py",),
    ),
    Plant(
        "halves summed in halves",
        "kernels",
        "tvmbridge.legalize.reductions",
        'return "float32" if dtype in HALF else dtype',
        "return dtype",
        (f"{_LEGALIZE}/test_reductions.py",),
    ),
    Plant(
        "a float64 root by way of float32",
        "kernels",
        "tvmbridge.legalize.functions",
        '"sqrt": by_dtype(tirx.sqrt, tirx.sqrt)',
        '"sqrt": by_dtype(tirx.sqrt, lambda x: '
        'tirx.Cast("float64", tirx.sqrt(tirx.Cast("float32", x))))',
        (f"{_LEGALIZE}/test_functions.py", "-k", "float64"),
    ),
    Plant(
        "NaN lost by a maximum",
        "kernels",
        "tvmbridge.legalize.elementwise",
        "tirx.Or(better(a, b), is_nan(a))",
        "better(a, b)",
        (f"{_LEGALIZE}/test_nan.py",),
    ),
    Plant(
        "NaN lost by clamp",
        "kernels",
        "tvmbridge.legalize.elementwise",
        "tirx.Select(value < edge, edge, value)",
        "tirx.Select(value >= edge, value, edge)",
        ("tests/frontend/test_traps.py", _LEGALIZE, "-k", "nan"),
    ),
    Plant(
        "a reduction on a GPU read beside its own position",
        "kernels",
        "tvmbridge.schedules.gpu.tails",
        "same = size == 1 or all(",
        "same = size == 1 or any(",
        ("tests/schedules/gpu/test_merged_kernels.py", "-k", "own_position"),
    ),
    Plant(
        "pieces of a concatenation are read outside of their branches",
        "kernels",
        "tvmbridge.schedules.values",
        "if not load.guarded and read & slots",
        "if read & slots",
        ("tests/schedules/gpu/test_moves.py", "-k", "pieces"),
    ),
    Plant(
        "merged casts move before their operands",
        "kernels",
        "tvmbridge.passes.relax.merge_casts",
        "self.defined.get(operand, -1) < group.place",
        "self.defined.get(operand, -1) < number",
        ("tests/passes/relax/test_merge_casts.py", "-k", "gradients"),
    ),
    Plant(
        "two values determine a factor and a constant",
        "passes",
        "tvmbridge.symbolic.sizes",
        "    return len(set(zip(*of, strict=True))) <= _MOST_UNKNOWN",
        "    return False",
        ("tests/symbolic/test_sizes.py", "-k", "two_values"),
    ),
    Plant(
        "an exported bag that ends one element late",
        "kernels",
        "tvmbridge.exporting.bags",
        "with loops(tirx.max(end - begin, index(0))) as (i,):",
        "with loops(tirx.min(end - begin + index(1), index(count) - begin)) as (i,):",
        ("tests/export/test_operators.py", "-k", "operators and bags"),
    ),
)
