"""CastFirst: narrowing casts move before permutations, and change no value."""

from __future__ import annotations

import torch
from tvm import relax
from tvm.relax import op

from tests.relax_helpers import (
    apply_pass,
    assert_changes_nothing,
    build_main,
    compile_and_run,
    operators,
)
from tvmbridge.passes.relax.cast_first import CastFirst


def _cast(x: relax.Expr, dtype: str) -> relax.Expr:
    return op.astype(relax.BlockBuilder.current().emit(op.permute_dims(x, [2, 0, 1])), dtype)


def test_the_cast_is_first() -> None:
    x = torch.randn(2, 3, 4)
    mod = build_main([x], lambda v: _cast(v, "float16"))
    after, report = apply_pass(CastFirst(), mod)
    assert report.rewrites == 1
    assert operators(after)[-2:] == ["relax.astype", "relax.permute_dims"]
    (found,) = compile_and_run(after, x)
    assert torch.equal(found, x.permute(2, 0, 1).half())


def test_what_widens_stays() -> None:
    assert_changes_nothing(
        CastFirst(), build_main([torch.randn(2, 3, 4).half()], lambda v: _cast(v, "float32"))
    )


def test_other_casts_stay() -> None:
    graph = build_main([torch.randn(2, 3)], lambda v: op.astype(v, "float16"))
    assert_changes_nothing(CastFirst(), graph)
