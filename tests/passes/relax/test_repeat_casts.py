"""RepeatCasts: a widening cast with several readers is repeated for each; others are unchanged."""

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
from tvmbridge.passes.relax.repeat_casts import CHEAP_ON_GPUS, RepeatCasts


def _two_readers(x: relax.Expr, dtype: str = "float32") -> list[relax.Expr]:
    cast = relax.BlockBuilder.current().emit(op.astype(x, dtype))
    return [op.exp(cast), op.sum(cast, axis=[0]), op.multiply(cast, cast)]


def test_each_reader_has_its_own() -> None:
    x = torch.randn(3, 4).half()
    mod = build_main([x], _two_readers)
    after, report = apply_pass(RepeatCasts(), mod)
    # The product reads the cast twice.
    assert report.rewrites == 3
    assert operators(after).count("relax.astype") == 4
    for found, kept in zip(compile_and_run(after, x), compile_and_run(mod, x), strict=True):
        assert torch.equal(found, kept)


def test_narrowing_casts_stay() -> None:
    mod = build_main([torch.randn(3, 4)], lambda x: _two_readers(x, "float16"))
    assert_changes_nothing(RepeatCasts(), mod)


def test_integers_stay() -> None:
    mod = build_main([torch.ones(3, 4, dtype=torch.int32)], _two_readers)
    assert_changes_nothing(RepeatCasts(), mod)


def test_one_reader_is_enough() -> None:
    x = torch.randn(3, 4).bfloat16()
    assert_changes_nothing(
        RepeatCasts(), build_main([x], lambda v: op.exp(op.astype(v, "float32")))
    )


def test_functions_of_a_cast_are_repeated_too() -> None:
    def graph(x: relax.Expr) -> list[relax.Expr]:
        emit = relax.BlockBuilder.current().emit
        wide = emit(op.reshape(emit(op.astype(x, "float32")), (12,)))
        gate = emit(op.sigmoid(wide))
        return [op.multiply(wide, gate), op.subtract(gate, wide)]

    x = torch.randn(3, 4).bfloat16()
    mod = build_main([x], graph)
    after, report = apply_pass(RepeatCasts(CHEAP_ON_GPUS), mod)
    # The cast tensor has three readers, and its sigmoid has two.
    assert report.rewrites == 3
    assert operators(after).count("relax.sigmoid") == 2
    assert operators(after).count("relax.astype") == 4
    for found, kept in zip(compile_and_run(after, x), compile_and_run(mod, x), strict=True):
        assert torch.equal(found, kept)
