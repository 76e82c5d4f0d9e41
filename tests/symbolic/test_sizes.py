"""Sizes: a formula is derived from its values at sample shapes, only if it is unambiguous."""

from __future__ import annotations

import pytest
from tvm import tirx
from tvm.sym import Analyzer

from tvmbridge.kernels.sized import value_of
from tvmbridge.schedules.reader import substitute
from tvmbridge.symbolic.size import Size, proportional
from tvmbridge.symbolic.sizes import Sizes

# Sample shapes of two symbols, b and s.
POINTS = ((31, 43), (449, 257), (449, 17), (5, 17))


def values(function: object) -> tuple[int, ...]:
    return tuple(function(*p) for p in POINTS)  # type: ignore[operator]


@pytest.mark.parametrize(
    "function",
    [
        lambda b, s: b,
        lambda b, s: 64 * s,
        lambda b, s: 12 * b * s * s,
        lambda b, s: s + 1,
        lambda b, s: 3 * s - 2,
        lambda b, s: b * s - b,
        lambda b, s: b + s,
        lambda b, s: b + s - 1,
        lambda b, s: 2 * b - 3 * s,
        lambda b, s: 7,
    ],
)
def test_polynomials(function: object) -> None:
    found = Sizes(POINTS).find(values(function))
    assert found is not None
    for point in ((2, 3), (100, 64), (17, 1000)):
        assert found.at(point) == function(*point)  # type: ignore[operator]


@pytest.mark.parametrize(
    "function",
    [lambda b, s: b * s // 16, lambda b, s: -(-s // 8)],
)
def test_quotients_of_polynomials_that_were_found(function: object) -> None:
    sizes = Sizes(POINTS)
    sizes.find(values(lambda b, s: b * s))
    sizes.find(values(lambda b, s: s))
    found = sizes.find_divided(values(function))
    assert found is not None
    for point in ((2, 3), (100, 64), (17, 1000)):
        assert found.at(point) == function(*point)  # type: ignore[operator]


@pytest.mark.parametrize(
    "function",
    [
        lambda b, s: 8 * b * ((s + 1) // 2),
        lambda b, s: ((b + 1) // 2) * ((s + 1) // 2),
        lambda b, s: 3 * s * ((b + 1) // 2) - 5,
        lambda b, s: ((b + 1) // 2) * ((s + 1) // 2) // 16,
    ],
)
def test_products_of_what_strides_leave(function: object) -> None:
    # Like the compiler's sample shapes: differences of a symbol's sizes have no small divisor.
    points = ((31, 23), (502, 478), (502, 11), (3, 11))

    def of(wanted: object) -> tuple[int, ...]:
        return tuple(wanted(*p) for p in points)  # type: ignore[operator]

    sizes = Sizes(points)
    for known in (lambda b, s: b, lambda b, s: s):
        sizes.find(of(known))
    for extent in (lambda b, s: (b + 1) // 2, lambda b, s: (s + 1) // 2):
        assert sizes.find_divided(of(extent)) is not None
    sizes.find(of(lambda b, s: ((b + 1) // 2) * ((s + 1) // 2)))
    found = sizes.find_divided(of(function))
    assert found is not None
    b, s = tirx.Var("b", "int64"), tirx.Var("s", "int64")
    expression = found.expression([b, s])
    for point in ((2, 3), (100, 64), (17, 1000)):
        assert found.at(point) == function(*point)  # type: ignore[operator]
        at = substitute(
            expression, {b: tirx.IntImm("int64", point[0]), s: tirx.IntImm("int64", point[1])}
        )
        assert int(Analyzer().simplify(at)) == found.at(point)
        fields = found.terms, found.divisor, found.remainder
        assert value_of(*fields, point, found.atom_fields) == found.at(point)


@pytest.mark.parametrize(
    "function",
    [
        lambda b, s: 2 * (b * s + 1) * (b * s + 1),
        lambda b, s: 12 * b * (s + 91) * (s + 91),
        lambda b, s: (b * s + 1) * (s + 91),
        lambda b, s: (b * s + 1) * (b * s + 1) // 16,
    ],
)
def test_products_of_sums_that_were_found(function: object) -> None:
    sizes = Sizes(POINTS)
    assert sizes.find(values(function)) is None
    for known in (lambda b, s: b * s + 1, lambda b, s: s + 91):
        assert sizes.find(values(known)) is not None
    sizes.find(values(lambda b, s: (b * s + 1) * (b * s + 1)))
    found = sizes.find_divided(values(function))
    assert found is not None
    for point in ((2, 3), (100, 64), (17, 1000)):
        assert found.at(point) == function(*point)  # type: ignore[operator]


# The smallest number of each is below those that may be products by chance.
@pytest.mark.parametrize(
    ("function", "known"),
    [
        (lambda b, h, w: b * (h // 8 * (w // 8) + 1), True),
        (lambda b, h, w: (h // 8 + 1) * (w // 8 + 2), False),
    ],
)
def test_small_products_of_sums_are_found(function: object, known: bool) -> None:
    points = ((23, 47, 43), (463, 509, 503), (463, 16, 16), (2, 509, 16), (2, 16, 503), (2, 16, 16))
    eighths = [Size(((1, (0, h, 1 - h)),), 8) for h in (1, 0)]
    tokens = Size(((1, (0, 0, 0, 1, 1)), (1, (0,) * 5)), atoms=tuple(eighths))
    found = Sizes(points, [*eighths, tokens]).find(tuple(function(*p) for p in points))  # type: ignore[operator]
    assert (found is not None) == known
    assert found is None or found.at((7, 80, 96)) == 7 * (10 * 12 + 1)


def test_small_numbers_are_no_quotients() -> None:
    """Check 1, 2 and 1: at these sample shapes both -s % 6 and ceil(s / 512) have these values."""
    sizes = Sizes([(83,), (718,), (17,)])
    sizes.find((83, 718, 17))
    assert sizes.find_divided((1, 2, 1)) is None


def test_what_several_functions_could_be_is_not_found() -> None:
    sizes = Sizes(POINTS)
    # All sample sizes are odd, for which s // 2 equals (s - 1) // 2, so the formula is ambiguous.
    sizes.find(values(lambda b, s: s))
    sizes.find(values(lambda b, s: s - 1))
    assert sizes.find_divided(values(lambda b, s: s // 2)) is None


def test_other_functions_are_not_found() -> None:
    sizes = Sizes(POINTS)
    assert sizes.find(values(lambda b, s: b + 2 * s + 1)) is None
    assert sizes.find(values(lambda b, s: min(b, s))) is None
    assert sizes.find_divided(values(lambda b, s: b ^ s)) is None


def test_expressions_have_the_same_values() -> None:
    b, s = tirx.Var("b", "int64"), tirx.Var("s", "int64")
    size = Size(((3, (1, 2)), (-5, (0, 0))), 4)
    expression = size.expression([b, s])
    at_point = substitute(expression, {b: tirx.IntImm("int64", 7), s: tirx.IntImm("int64", 11)})
    assert int(Analyzer().simplify(at_point)) == size.at((7, 11)) == (3 * 7 * 121 - 5) // 4


def test_images_with_borders() -> None:
    def padded(b: int, s: int) -> int:
        return 8 * b * (s // 2 + 3) * (b + 2)

    for whole in (
        lambda b, s: 3 * (b + 2) * (s + 6),
        lambda b, s: 12 * b * (s + 3) * (s + 3),
        # A kernel of 7 x 7 with dilation 3.
        lambda b, s: 32 * (b + 18) * (s + 18),
        lambda b, s: 32 * b * (s + 18),
    ):
        found = Sizes(POINTS).find(values(whole))
        assert found is not None
        assert found.at((10, 20)) == whole(10, 20)
    # At odd sizes alone, 2 * (s // 2 + 3) equals s + 5.
    points = (*POINTS, (31, 58))

    def of(wanted: object) -> tuple[int, ...]:
        return tuple(wanted(*p) for p in points)  # type: ignore[operator]

    for some, served in ((POINTS, False), (points, True)):
        sizes = Sizes(some)
        count = len(some)
        sizes.find(of(lambda b, s: s)[:count])
        assert sizes.find_divided(of(lambda b, s: s // 2)[:count]) is not None
        found = sizes.find(of(padded)[:count])
        assert (found is not None) == served
    for point in ((2, 3), (100, 64), (17, 1000)):
        assert found is not None
        assert found.at(point) == padded(*point)
    assert sizes.find(of(lambda b, s: padded(b, s) + 5)) is None
    sizes = Sizes(POINTS)
    sizes.find(values(lambda b, s: s))
    assert sizes.find_divided(values(lambda b, s: s // 2)) is not None
    # All sample sizes are odd, so the values also equal (s + 1) * (s + 3).
    assert sizes.find(values(lambda b, s: 4 * (s // 2 + 2) * (s // 2 + 1))) is None


@pytest.mark.parametrize("stride", [4, 8])
def test_two_values_of_a_quotient_determine_no_factor_and_constant(stride: int) -> None:
    """Check the elements of an image of ``extent + 1`` rows and columns at 19, 478 and 17.

    The extent is the same at 17 and 19, so that ``63 * extent - 117`` has the same values.
    """
    points = ((19,), (478,), (17,))
    extent = Size(((1, (1,)), (-1, (0,))), stride)
    found = Sizes(points, [extent]).find(tuple((extent.at(p) + 1) ** 2 for p in points))
    assert found is None or found.at((200,)) == (extent.at((200,)) + 1) ** 2


@pytest.mark.parametrize("tile", [4, 8])
def test_two_values_of_a_quotient_determine_no_border(tile: int) -> None:
    """Check rows that are rounded up to a tile, at sample shapes that give 3 or 307 rows."""
    points = ((23, 11), (463, 1226), (463, 9), (2, 1226), (2, 9))
    rows = Size(((1, (0, 1)), (3, (0, 0))), 4)

    def rounded(point: tuple[int, ...]) -> int:
        return 32 * point[0] * -(-rows.at(point) // tile) * tile

    found = Sizes(points, [rows]).find(tuple(rounded(p) for p in points))
    assert found is None or found.at((2, 49)) == rounded((2, 49))


def test_quotients_that_are_proportional_at_the_sample_shapes_are_told_apart() -> None:
    """Check rows after two and three strides: odd numbers of the first follow from the second."""
    quarters, eighths = (Size(((1, (0, 1)), (n - 1, (0, 0))), n) for n in (4, 8))
    points = [(23, 19), (463, 1234), (2, 1234), (2, 11)]
    values = [quarters.at(p) + 8 for p in points]
    assert Sizes(points, [quarters, eighths]).find(tuple(values)) is None
    ((size, point),) = proportional([quarters, eighths], points)
    assert size == eighths
    points.append(point)
    found = Sizes(points, [quarters, eighths]).find((*values, quarters.at(point) + 8))
    assert found is not None
    assert found.at((2, 49)) == quarters.at((2, 49)) + 8
    assert not proportional([quarters, eighths, quarters], points)


def test_sizes_that_differ_beyond_the_sample_shapes_alone_are_one_size() -> None:
    """A queue of 32 rows is written at a place, and the next place begins anew after the last."""
    end = Size(((1, (1,)), (4, (0,))))
    place = Size(end.terms, divisor=32, remainder=True)
    assert Sizes(((23,), (26,), (3,)), (end, place)).find((27, 30, 7)) == end
    assert Sizes(((23,), (27,), (3,)), (end, place)).find((27, 31, 7)) == end
    assert Sizes(((23,), (29,), (3,)), (end, place)).find((27, 1, 7)) == place
    low = Size(((1, (1,)), (1, (0,))), divisor=2), Size(((1, (1,)),), divisor=2)
    assert Sizes(((10,), (22,), (2,)), low).find((5, 11, 1)) is None
