"""A mistake that tests of ``compare`` and of checked calls plant."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import tvm
from tvm import relax


@pytest.fixture
def lost_scale() -> Iterator[None]:
    """Plant a wrong gradient rule of tanh: 1 - y^2/2 instead of 1 - y^2."""

    def wrong(var: Any, call: Any, cotangent: Any, builder: Any) -> list[relax.Expr]:
        one, half = (relax.const(number, str(call.ty.dtype)) for number in (1.0, 0.5))
        square = relax.op.multiply(relax.op.multiply(var, var), half)
        return [relax.op.multiply(cotangent, relax.op.subtract(one, square))]

    operator = tvm.ir.Op.get("relax.tanh")
    right = operator.get_attr("FPrimalGradient")
    relax.op.register_gradient("relax.tanh", wrong, level=30)
    yield
    operator.reset_attr("FPrimalGradient")
    relax.op.register_gradient("relax.tanh", right, level=10)
