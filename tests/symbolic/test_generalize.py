"""Modules that differ in sizes alone are generalized to one symbolic module; others are refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy
import pytest
import torch
import tvm
import tvm_ffi
from tvm import relax, te, tirx

from tvmbridge.core.common_decisions import agreed, followed
from tvmbridge.core.decisions import (
    Decision,
    Results,
    Rule,
    decided,
    divides,
    fitting,
    recorded_decisions,
    remembered,
    repeated_decisions,
    simplifies,
)
from tvmbridge.core.errors import BuildError
from tvmbridge.symbolic.generalize import generalize
from tvmbridge.symbolic.sizes import DifferentCodeError, Sizes

POINTS = ((31,), (449,), (5,))


def module(size: int, scale: float = 2.0, text: str = "{}") -> tvm.IRModule:
    """Return ``reshape(kernel(x) * scale)`` for an ``x`` of ``size`` rows."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType([size, 4], "float32"))
    with builder.function("forward", [x]):
        with builder.dataflow():
            called = builder.emit(
                relax.op.call_pure_packed(
                    "tvmbridge.aten",
                    tvm.ir.StringImm(text),
                    x,
                    ty_args=[relax.TensorType([size, 4], "float32")],
                )
            )
            scaled = builder.emit(relax.op.multiply(called, relax.const(scale, "float32")))
            output = builder.emit_output(relax.op.reshape(scaled, [size * 4]))
        builder.emit_func_output(output)
    return relax.transform.LegalizeOps()(builder.get())


def test_shapes_loops_and_specs_get_the_symbol() -> None:
    mods = [module(n, text=f'{{"args": [{n}, 7]}}') for (n,) in POINTS]
    found = generalize(mods, Sizes(POINTS))
    relax.analysis.well_formed(found)
    forward = found["forward"]
    (symbol,) = forward.params[-1].ty.values
    rows, columns = forward.params[0].ty.shape.values
    assert rows.same_as(symbol)
    assert int(columns) == 4
    tvm.ir.assert_structural_equal(forward.ret_ty.shape.values[0], symbol * 4)
    call = forward.body.blocks[0].bindings[0].value
    assert call.args[0].global_symbol == "tvmbridge.aten.sized"
    assert call.args[1].value == '{"args": [{"size": [[[1, [1]]], 1, false, []]}, 7]}'
    extents: list[object] = []
    for _, function in found.functions_items():
        if isinstance(function, tirx.PrimFunc):
            tvm_ffi.structural_walk(function.body, (tirx.For, lambda f: extents.append(f.extent)))
    assert any(isinstance(extent, tirx.Var) for extent in extents)


def looped(size: int, factor: float) -> tvm.IRModule:
    """Return a loop function with the constant ``factor``, like a fused function."""
    x = te.placeholder((size,), "float32", "x")
    y = te.compute((size,), lambda i: x[i] * tirx.FloatImm("float32", factor), "y")
    function = te.create_prim_func([x, y]).with_attr("global_symbol", "scale")
    return tvm.IRModule({"scale": function})


@pytest.mark.parametrize(
    "form",
    [
        *(lambda n: 1.0 / n, lambda n: n / (n - 1.0), lambda n: 1.0 / (n - 1.0), float),
        *(lambda n: n - 1.0, lambda n: 2.0 / (n - 1.0), lambda n: -3.0 / n),
    ],
)
def test_factors_of_means_and_variances_follow_the_size(form: Callable[[int], float]) -> None:
    def factor(size: int) -> float:
        return float(numpy.float32(form(size)))

    found = generalize([looped(n, factor(n)) for (n,) in POINTS], Sizes(POINTS))
    built = tvm.tirx.build(found, target="llvm")
    x, y = (tvm.runtime.from_dlpack(torch.ones(12).mul_(k)) for k in (1, 0))
    built["scale"](x, y, 12)
    assert torch.from_dlpack(y).eq(factor(12)).all()


def test_other_factors_are_refused() -> None:
    with pytest.raises(DifferentCodeError):
        generalize([looped(n, n**0.5) for (n,) in POINTS], Sizes(POINTS))


def test_other_code_is_refused() -> None:
    mods = [module(n) for (n,) in POINTS[:2]]
    other = tvm.IRModule({"forward": module(5)["forward"]})
    with pytest.raises(DifferentCodeError):
        generalize([*mods, other], Sizes(POINTS))
    with pytest.raises(DifferentCodeError):
        generalize([*mods, module(5, text='{"other": 1}')], Sizes(POINTS))


def test_decisions_of_several_sizes_are_brought_together() -> None:
    def decide(size: int) -> list[object]:
        return [
            fitting(lambda n: min(n, 16), size),
            decided(Rule.MIDDLE, lambda: size),
            decided(Rule.MOST, lambda: size > 100),
            decided(Rule.ALWAYS, lambda: size > 16),
        ]

    recorded = []
    for size in (32, 448, 7):
        with recorded_decisions() as decisions:
            decide(size)
        recorded.append(decisions)
    for_all, agree = agreed(recorded)
    assert agree
    with repeated_decisions(for_all):
        assert decide(7) == [4, 32, True, False]
    with pytest.raises(BuildError, match="less is decided"), repeated_decisions(for_all):
        pass
    # The first decision is of the same rule; another place makes it.
    with pytest.raises(BuildError, match="other things"), repeated_decisions(for_all):
        fitting(lambda n: 1, 1)


def test_decisions_after_one_that_differs_are_recorded_again() -> None:
    def decide(size: int) -> list[object]:
        if decided(Rule.ALWAYS, lambda: size <= 8):
            return [fitting(lambda n: min(n, 4), size)]
        return [decided(Rule.MIDDLE, lambda: size), fitting(lambda n: min(n, 16), size)]

    for_all: list[Decision] = []
    for known, expected in ((0, False), (1, True)):
        assert len(for_all) == known
        recorded: dict[int, list[Decision]] = {}
        for size in (32, 448, 7):
            like = followed(list(recorded.values()), for_all)
            with recorded_decisions(like) as recorded[size]:
                decide(size)
        for_all, agree = agreed([recorded[n] for n in (32, 448, 7)], known=for_all)
        assert agree is expected
    with repeated_decisions(for_all):
        assert decide(7) == [32, 4]


def test_decisions_follow_the_bounds_that_smaller_sizes_show() -> None:
    def decide(size: int) -> list[object]:
        return [
            fitting(lambda n: min(1 << n.bit_length() - 1, 16), size),
            divides(4, size),
            divides(4, 4 * size),
            decided(Rule.ALWAYS, lambda: size > 16),
        ]

    recorded: dict[int, list[Decision]] = {}
    made = {}
    for size in (32, 448, 7, 128):
        with recorded_decisions(followed(list(recorded.values()))) as recorded[size]:
            made[size] = decide(size)
    assert made[128] == [4, False, True, False]
    sizes = Sizes([(32,), (448,), (128,), (7,)])
    for_all, agree = agreed([recorded[n] for (n,) in sizes.points], sizes.content)
    assert agree
    assert recorded[128] == for_all
    with repeated_decisions(for_all):
        assert decide(32) == made[128]


def test_a_fact_that_is_true_at_some_sizes_alone_simplifies_nothing() -> None:
    def is_one(size: int) -> bool:
        return simplifies(size - 1 == 1)

    with recorded_decisions() as decisions:
        assert not is_one(31)
    with repeated_decisions(decisions):
        assert not is_one(2)
    with recorded_decisions() as decisions:
        assert is_one(2)
    with pytest.raises(BuildError, match="not true"), repeated_decisions(decisions):
        is_one(31)
    assert simplifies(True)


def test_results_are_made_again_only_where_the_decisions_for_all_sizes_differ() -> None:
    made: list[str] = []

    def make(name: str, size: int) -> object:
        made.append(name)
        lanes = fitting(lambda n: min(1 << n.bit_length() - 1, 16), size)
        return name, bool(divides(4, size)), lanes

    def both(size: int) -> list[object]:
        return [remembered(n, partial(make, n, s)) for n, s in (("size", size), ("fixed", 8))]

    recorded, results = [], []
    for size in (32, 448, 7):
        kept: Results = {}
        with recorded_decisions(results=kept) as decisions:
            both(size)
        recorded.append(decisions)
        results.append(kept)
    again = ["size"], ["size"], []
    for size, kept, expected in zip((32, 448, 7), results, again, strict=True):
        made.clear()
        with repeated_decisions(agreed(recorded)[0], kept):
            assert both(size) == [("size", False, 4), ("fixed", True, 8)]
        assert made == expected


def test_what_divides_a_size_at_the_points_alone_does_not_divide_it() -> None:
    sizes = Sizes([(113, 31), (769, 449), (17, 5)])

    def decide(n: int, rows: int) -> list[bool]:
        return [divides(16, n - 1), divides(16, rows * (n - 1)), divides(8, 8 * n), divides(8, 24)]

    recorded = []
    for point in sizes.points:
        with recorded_decisions() as decisions:
            assert all(decide(*point))
        recorded.append(decisions)
    for content, expected in ((sizes.content, True), (None, False)):
        given = () if content is None else (content,)
        with repeated_decisions(agreed(recorded, *given)[0]):
            assert decide(20, 3) == [False, False, expected, True]
    assert divides(16, 32)
    assert not divides(16, 33)


def strided(size: int) -> tvm.IRModule:
    """Return a loop over a padded extent, over the extent that a stride leaves, and the size."""
    extent = (size + 1) // 2
    padded = te.placeholder((extent + 2,), "float32", "padded")
    whole = te.placeholder((size,), "float32", "whole")
    left = te.compute((extent,), lambda i: padded[i + 2] + whole[i], "left")
    function = te.create_prim_func([padded, whole, left]).with_attr("global_symbol", "strided")
    return tvm.IRModule({"strided": function})


def test_a_padded_extent_may_stand_before_the_extent() -> None:
    points = ((37,), (466,), (17,))
    found = generalize([strided(n) for (n,) in points], Sizes(points))
    (function,) = found.functions.values()
    symbol = function.params[-1]
    two = tirx.IntImm("int64", 2)
    expected = tirx.FloorDiv(symbol + tirx.IntImm("int64", 1), two) + two
    tvm.ir.assert_structural_equal(
        function.params[0].shape[0], tirx.Cast("int32", expected), map_free_vars=True
    )
