"""Mistakes in converters, gradient rules and graph passes."""

from __future__ import annotations

from tests.planted.plant import Plant

_TRAPS = "tests/frontend/test_traps.py"
_RULES = "tests/gradients/test_rules.py"
_PASSES = "tests/passes/relax"

GRAPHS = (
    Plant(
        "alpha dropped",
        "converters",
        "tvmbridge.frontend.elementwise",
        "    if alpha != 1:\n        right = ",
        "    if False:\n        right = ",
        (_TRAPS, "-k", "promotion and alpha"),
        quick=True,
    ),
    Plant(
        "negative slice",
        "converters",
        "tvmbridge.frontend.shapes",
        "first, last, _ = slice(start, end, step)",
        "first, last, _ = slice(abs(start or 0), end, step)",
        (_TRAPS, "-k", "computed and negative"),
    ),
    Plant(
        "promotion of a quotient",
        "converters",
        "tvmbridge.frontend.elementwise",
        "(_plain(relax.op.divide))",
        "(lambda ctx, node, a, b: ctx.cast(\n"
        "    (relax.op.divide if result_dtype(a).is_floating_point else relax.op.floor_divide)(\n"
        "        ctx.value(a), ctx.tensor(b, result_dtype(a))\n"
        "    ), result_dtype(a), result_dtype(node)))",
        (_TRAPS, "-k", "promotion"),
    ),
    Plant(
        "gelu by tanh",
        "converters",
        "tvmbridge.frontend.elementwise",
        'if approximate == "tanh":',
        'if approximate != "tanh":',
        (_TRAPS, "-k", "gelu or precision"),
    ),
    Plant(
        "padding on the other side",
        "converters",
        "tvmbridge.frontend.shapes",
        "parts.insert(0 if first else len(parts), fill)",
        "parts.insert(len(parts) if first else 0, fill)",
        (_TRAPS, "-k", "pad"),
    ),
    Plant(
        "scale of erf's gradient",
        "rules",
        "tvmbridge.gradients.rules",
        "constant_like(x, 2.0 / math.sqrt(math.pi))",
        "constant_like(x, 1.0 / math.sqrt(math.pi))",
        (_RULES, "-k", "erf"),
    ),
    Plant(
        "sign of rsqrt's gradient",
        "rules",
        "tvmbridge.gradients.rules",
        "constant_like(of.cotangent, -0.5)), cube",
        "constant_like(of.cotangent, 0.5)), cube",
        (_RULES, "-k", "rsqrt"),
    ),
    Plant(
        "ties of maximum",
        "rules",
        "tvmbridge.gradients.rules",
        "half = op.multiply(of.cotangent, constant_like(of.cotangent, 0.5))",
        "half = of.cotangent",
        (_RULES, "-k", "maximum or minimum"),
    ),
    Plant(
        "ties of amax",
        "rules",
        "tvmbridge.gradients.rules",
        "return [op.divide(op.multiply(grad, ties), count)]",
        "return [op.multiply(ties, grad)]",
        (_RULES, "-k", "max or min"),
    ),
    Plant(
        "epsilon of layer norm",
        "passes",
        "tvmbridge.passes.relax.lower_layer_norm",
        "float(call.attrs.epsilon)",
        "1e-5",
        (f"{_PASSES}/test_normalizations.py", "tests/test_norms.py", "-k", "float64 or layer"),
    ),
    Plant(
        "product with zero removed",
        "passes",
        "tvmbridge.passes.relax.zero_zapp",
        '"relax.add", "relax.subtract"',
        '"relax.multiply", "relax.subtract"',
        (f"{_PASSES}/test_neutral.py",),
        quick=True,
    ),
    Plant(
        "slices of combined products swapped",
        "passes",
        "tvmbridge.passes.relax.combine_parallel_batch_matmul",
        "        for product in self.group.different:\n            if product.weight.same_as",
        "        for product in reversed(self.group.different):\n"
        "            if product.weight.same_as",
        (f"{_PASSES}/test_combine_parallel_batch_matmul.py",),
    ),
    Plant(
        "slices of combined gradients swapped",
        "passes",
        "tvmbridge.passes.relax.combine_gradient_matmul",
        "zip(plan.flows, plan.weight, strict=True):\n            self.parts",
        "zip(plan.flows, reversed(list(plan.weight)), strict=True):\n            self.parts",
        (f"{_PASSES}/test_combine_gradient_matmul.py",),
    ),
    Plant(
        "scale of dropout",
        "passes",
        "tvmbridge.passes.relax.lower_dropout",
        "1.0 / (1.0 - rate)",
        "1.0 / rate",
        (f"{_PASSES}/test_lower_dropout.py",),
    ),
)
