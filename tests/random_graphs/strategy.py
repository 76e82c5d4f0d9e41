"""The hypothesis strategy that draws programs without state changes or several calls."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from tests.random_graphs import elementwise, reductions, shapes, state
from tests.random_graphs.author import Author
from tests.random_graphs.elementwise import Family
from tests.random_graphs.program import Leaf, Program

FAMILIES: list[Family] = [
    *[elementwise.unary] * 4,
    *[elementwise.binary] * 5,
    *[elementwise.kinked] * 2,
    elementwise.compared,
    *[elementwise.masked] * 2,
    elementwise.mixed,
    elementwise.whole,
    elementwise.random,
    *[shapes.move] * 5,
    shapes.regroup,
    shapes.joined,
    shapes.indexed,
    shapes.gathered,
    *[reductions.reduced] * 4,
    reductions.ordered,
    *[reductions.product] * 2,
    *[reductions.layer] * 2,
    *[state.inplace] * 3,
    state.buffer,
]

EXTENTS = [1, 2, 3, 4, 5, 7]


@st.composite
def programs(draw: st.DrawFn, least: int = 5, most: int = 40) -> Program:
    """Draw a program of up to ``most`` lines; one in five is in float32, the others in float64."""
    special = draw(st.integers(0, 11)) == 5
    author = Author("float32" if draw(st.integers(0, 4)) == 3 else "float64", special)
    _leaves(draw, author)
    wanted = draw(st.integers(least, most))
    for _ in range(3 * wanted):
        if len(author.lines) >= wanted:
            break
        candidate = draw(st.sampled_from(FAMILIES))(draw, author)
        if candidate is not None:
            quiet = draw(st.integers(0, 19)) == 7
            author.write(candidate, within="torch.no_grad()" if quiet else "")
    options = [("joint", "aot")] if draw(st.integers(0, 5)) == 3 else []
    options += [("residual_policy", "save_all")] if draw(st.integers(0, 7)) == 5 else []
    return author.finish(_returned(draw, author), options)


def _leaves(draw: st.DrawFn, author: Author) -> None:
    shape = tuple(draw(st.lists(st.sampled_from(EXTENTS), min_size=1, max_size=3)))
    shapes = [shape, shape[-1:], tuple(1 if draw(st.booleans()) else n for n in shape), shape]
    count = draw(st.integers(1, 3))
    for number in range(count):
        kinds = ["special"] if author.special and number == 0 else ["grid", "normal", "normal"]
        values, wanted = draw(st.sampled_from(kinds)), draw(st.integers(0, 3)) > 0
        author.leaf(Leaf(f"x{number}", "input", shapes[number], author.dtype, values, wanted))
    author.leaf(Leaf("p0", "parameter", shapes[count], author.dtype, "normal", True))
    if draw(st.booleans()):
        author.leaf(Leaf("m0", "input", draw(st.sampled_from(shapes)), "bool", "mask"))
    if draw(st.booleans()):
        author.leaf(Leaf("i0", "input", (2,), "int64", "index"))


def _returned(draw: st.DrawFn, author: Author) -> str:
    """Draw the returned expression: the last values that no line read, and sometimes others."""
    made = [name for name in author.names if name.startswith("v")] or author.names
    chosen = [name for name in reversed(made) if name not in author.used][:4] or made[-1:]
    chosen += [n for n in made if n in author.drawn - author.used and n not in chosen]
    if draw(st.integers(0, 3)) == 2:
        chosen.append(draw(st.sampled_from([n for n in author.names if not n.startswith("self.")])))
    if not any(author.value(name).requires_grad for name in chosen):
        # At least one result must require a gradient.
        chosen.append("torch.sin(self.p0)")
    return structured(draw, chosen)


def structured(draw: st.DrawFn, chosen: Sequence[str]) -> str:
    """Draw an expression that returns all of ``chosen`` in a tuple, a dict or a list."""
    form = draw(st.sampled_from(["tuple", "tuple", "dict", "list", "single"]))
    if form == "single" and len(chosen) == 1:
        return chosen[0]
    if form == "dict":
        return "{" + ", ".join(f"'k{n}': {name}" for n, name in enumerate(chosen)) + "}"
    inner = ", ".join(chosen)
    return f"[{inner}]" if form == "list" else f"({inner},)"
