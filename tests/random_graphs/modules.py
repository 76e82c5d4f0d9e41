"""The hypothesis strategy that draws modules with state, and several calls of each."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from tests.random_graphs import (
    dtypes,
    elementwise,
    layers,
    reductions,
    regions,
    shapes,
    state,
    writes,
)
from tests.random_graphs.author import Author
from tests.random_graphs.calls import LISTS, calls, layouts
from tests.random_graphs.elementwise import Family
from tests.random_graphs.program import Leaf, Program
from tests.random_graphs.strategy import structured

ORDINARY: list[Family] = [
    *[elementwise.unary] * 3,
    *[elementwise.binary] * 3,
    elementwise.kinked,
    *[shapes.move] * 3,
    *[reductions.reduced] * 2,
    reductions.layer,
    layers.layer,
]

# Kinds of lines. A program has only one to three kinds, so that few programs are refused for
# several reasons at once.
THEMES: dict[str, list[Family]] = {
    "layers": [layers.layer, layers.layer, layers.tied],
    "writes": [writes.through, state.inplace],
    "inputs": [writes.through, state.inplace],
    "buffers": [state.buffer, writes.slices, writes.counter],
    "custom": [regions.custom],
    "checkpoints": [regions.checkpointed, layers.layer],
    "autocast": [regions.autocast, elementwise.binary],
    "branches": [regions.branch, regions.plain],
    "dtypes": [dtypes.cast, dtypes.promoted, elementwise.mixed],
    "truths": [elementwise.compared, elementwise.masked, elementwise.whole, dtypes.promoted],
    "empty": [dtypes.empty, dtypes.scalar],
    "draws": [dtypes.drawn, elementwise.random],
    "indices": [shapes.indexed, shapes.gathered, shapes.regroup, shapes.joined],
    "orders": [reductions.ordered, reductions.product],
    "quiet": [],
    "lists": [regions.container],
    "attributes": [regions.kept, regions.plain],
    "views": [shapes.move, shapes.regroup],
}

REGIONS = {
    "quiet": [
        *["torch.no_grad()"] * 6,
        "torch.set_grad_enabled(False)",
        "torch.set_grad_enabled(self.training)",
        "torch.no_grad(), torch.enable_grad()",
        "torch.inference_mode()",
    ],
    "autocast": ["torch.autocast('cpu', torch.bfloat16)", "torch.autocast('cpu', enabled=False)"],
}

EXTENTS = [1, 2, 3, 4, 5]


@st.composite
def modules(draw: st.DrawFn, least: int = 2, most: int = 12) -> Program:
    """Draw a module of up to ``most`` lines with one to five calls; most are in float64."""
    names = st.sampled_from(sorted(THEMES))
    themes = draw(st.lists(names, min_size=1, max_size=3, unique=True))
    dtype = draw(st.sampled_from(["float32", "bfloat16", *["float64"] * 8]))
    author = Author(dtype, special=False, writes_inputs="inputs" in themes)
    given = _leaves(draw, author, lists="lists" in themes)
    families = ORDINARY + [family for theme in themes for family in THEMES[theme] * 4]
    wanted = draw(st.integers(least, most))
    for _ in range(3 * wanted):
        if len(author.lines) >= wanted:
            break
        candidate = draw(st.sampled_from(families))(draw, author)
        if candidate is not None:
            author.write(candidate, within=_region(draw, themes))
    options = [("joint", "aot")] if draw(st.integers(0, 5)) == 3 else []
    returned = _returned(draw, author)
    return author.finish(returned, options, draw(calls(author, given)))


def _region(draw: st.DrawFn, themes: list[str]) -> str:
    chosen = [theme for theme in themes if theme in REGIONS]
    if not chosen or draw(st.booleans()):
        return ""
    return draw(st.sampled_from(REGIONS[draw(st.sampled_from(chosen))]))


def _leaves(draw: st.DrawFn, author: Author, *, lists: bool) -> list[str]:
    """Draw the leaves; return the expression of each argument for the first call."""
    given: list[str] = []

    def argument(leaf: Leaf, text: str) -> None:
        given.append(text)
        author.leaf(leaf, text)

    shape = tuple(draw(st.lists(st.sampled_from(EXTENTS), min_size=1, max_size=4)))
    for number in range(draw(st.integers(1, 3))):
        drawn = shape if draw(st.booleans()) else shape[-draw(st.integers(1, len(shape))) :]
        wanted = draw(st.integers(0, 2)) > 0
        leaf = Leaf(f"x{number}", "input", drawn, author.dtype, "normal", wanted)
        argument(leaf, draw(layouts(leaf, written=author.writes_inputs)))
    author.leaf(Leaf("p0", "parameter", shape[-1:], author.dtype, "normal", True))
    if draw(st.integers(0, 2)) == 1:
        argument(Leaf("m0", "input", shape, "bool", "mask"), "m0")
    if draw(st.integers(0, 2)) == 1:
        argument(Leaf("i0", "input", (2,), "int64", "index"), "i0")
    if draw(st.integers(0, 2)) == 1:
        text = draw(st.sampled_from(["2", "0.5", "True", "3", "-1"]))
        argument(Leaf("n0", "input", (), author.dtype, "number"), text)
    if lists:
        text = draw(st.sampled_from(LISTS[:3])).format(x="x0")
        argument(Leaf("l0", "input", (), author.dtype, "list"), text)
    return given


# Further expressions that forward may return, of a value {v} or an argument {x}.
EXTRAS = """{v}|{v}.detach()|{v}[..., :1]|{v}.view(-1)|{v}[..., 1:]|{v}.mT|{x}|{x}[..., :1]|self.p0
None|{x}.shape[0]|self.training|{v}.shape|1.5|'text'|({v}, None)|[{x}]|{{'inner': {v}}}|{x}.detach()
{v}.requires_grad|self.p0 * 2|{v}.unbind(0)|{v}.chunk(2, -1)|{x}.view({x}.shape)|[]
{v} + 0|{v}.transpose(0, -1)|{x} is {v}|len({v})|{v}.expand(2, *{v}.shape)|{v}.clone()
{v}.is_contiguous()|{v}.max(0)|{v}.flatten()[::2]
torch.broadcast_tensors({v}, {v})|{v}.data""".replace("\n", "|").split("|")


def _returned(draw: st.DrawFn, author: Author) -> str:
    """Draw the returned expression: all values that no line read, and sometimes others."""
    inputs = [x.name for x in author.leaves if x.kind == "input" and x.is_tensor]
    made = [name for name in author.names if name.startswith("v")] or inputs
    # All unread values are returned: compiled code drops unread values, with the errors that they
    # would raise.
    chosen = [name for name in reversed(made) if name not in author.used] or made[-1:]
    for _ in range(draw(st.sampled_from([0, 0, 1, 1, 2]))):
        template = draw(st.sampled_from(EXTRAS))
        chosen.append(
            template.format(v=draw(st.sampled_from(made)), x=draw(st.sampled_from(inputs)))
        )
    buffers = [leaf for leaf in author.leaves if leaf.kind == "buffer"]
    if buffers and draw(st.integers(0, 2)) == 0:
        name = f"self.{draw(st.sampled_from(buffers)).name}"
        chosen.append(
            draw(st.sampled_from([name, f"{name}.clone()", f"{name} * 2", f"{name}[:1]"]))
        )
    if not any(_differentiable(author, name) for name in chosen):
        chosen.append("torch.sin(self.p0)")
    return structured(draw, chosen)


def _differentiable(author: Author, text: str) -> bool:
    try:
        value = author.value(text)
    except (RuntimeError, IndexError, ValueError, TypeError):
        return False
    return isinstance(value, torch.Tensor) and value.requires_grad
