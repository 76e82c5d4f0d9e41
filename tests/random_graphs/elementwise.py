"""Elementwise lines: functions of one or two values, masks, comparisons, integers, dropout."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import strategies as st

from tests.random_graphs.author import Author, Candidate

Family = Callable[[st.DrawFn, Author], Candidate | None]

SMOOTH = """torch.tanh({a})|torch.sigmoid({a})|torch.sin({a})|torch.cos({a})|torch.exp({a})
torch.erf({a})|F.gelu({a})|F.gelu({a}, approximate='tanh')|F.silu({a})|F.softplus({a})
F.mish({a})|torch.expm1({a})|{a} ** 2|{a} ** 3|torch.rsqrt({a} * {a} + 0.5)|-{a}
torch.sqrt({a} * {a} + 0.5)|torch.log({a} * {a} + 0.5)|torch.log1p({a} * {a})|{a}.detach()
torch.reciprocal({a} * {a} + 0.5)|F.logsigmoid({a})|torch.atan({a})|{a} * 1.5|{a} + 2|0.5 - {a}
{a} / 3|torch.rsub({a}, 1.5, alpha=2)|torch.add({a}, 1.25, alpha=-2)|2 / (1 + {a} ** 2)
{a}.clone()|torch.zeros_like({a}) + {a}|torch.ones_like({a})|torch.full_like({a}, 0.5)
{a} * {a}.sigmoid()""".replace("\n", "|").split("|")

# Expressions, each with a second one whose zeros are the kinks and jumps of the first.
KINKED = [
    ("torch.relu({a})", "{a}"),
    ("torch.abs({a})", "{a}"),
    ("F.leaky_relu({a}, 0.1)", "{a}"),
    ("F.elu({a})", "{a}"),
    ("F.selu({a})", "{a}"),
    ("torch.sign({a})", "{a}"),
    ("F.relu6({a})", "{a} * ({a} - 6)"),
    ("F.hardtanh({a})", "{a} * {a} - 1"),
    ("F.hardswish({a})", "{a} * {a} - 9"),
    ("torch.clamp({a}, -0.6, 0.7)", "({a} + 0.6) * ({a} - 0.7)"),
    ("torch.clamp({a}, min=0.25)", "{a} - 0.25"),
    ("torch.clamp({a}, max=-0.25)", "{a} + 0.25"),
    ("torch.floor({a})", "{a} - torch.round({a})"),
    ("torch.nan_to_num({a})", "torch.ones(())"),
]

TWO = [
    ("{a} + {b}", ""),
    ("{a} - {b}", ""),
    ("{a} * {b}", ""),
    ("torch.add({a}, {b}, alpha=0.5)", ""),
    ("torch.sub({a}, {b}, alpha=2)", ""),
    ("{a} / ({b} * {b} + 0.5)", ""),
    ("torch.lerp({a}, {b}, 0.3)", ""),
    ("torch.addcmul({a}, {a}, {b}, value=0.5)", ""),
    ("torch.addcdiv({a}, {a}, {b} * {b} + 1, value=-0.5)", ""),
    ("torch.pow({a} * {a} + 0.5, {b})", ""),
    ("torch.logaddexp({a}, {b})", ""),
    ("F.mse_loss(*torch.broadcast_tensors({a}, {b}), reduction='none')", ""),
    ("torch.maximum({a}, {b})", "{a} - {b}"),
    ("torch.minimum({a}, {b})", "{a} - {b}"),
    ("torch.clamp({a}, max={b})", "{a} - {b}"),
    ("torch.where({a} > {b}, {a}, {b} * 2)", "{a} - {b}"),
]

COMPARED = ["{a} > {b}", "{a} <= {b}", "{a} == {b}", "{a} != {b}", "torch.lt({a}, {b})"]

MASKED = """{a} * {m}|{m} + {a}|{a} - {m}.to({a}.dtype)|torch.where({m}, {a}, 0.0)
{a}.masked_fill({m}, -2.0)|torch.where({m}, {a} * 2, {a})|torch.where(~{m}, 1.0, {a})
{a}.masked_fill({m}, 0.5)""".replace("\n", "|").split("|")

WHOLE = """{i} + 1|{i} * 2 - {i}|1 - {i}|{i} % 2|{i} == 1|{i} + 0.5|{i} / 3|{i}.bool()|{i} // 2
{i}.sum()|{i}.max()|{i}.to(torch.float32) * 0.5|~({i} > 0)|({i} > 0) & ({i} < 2)|-{i}|{i}.cumsum(0)
({i} > 0).sum()|({i} > 0) * 3|torch.bitwise_xor({i}, {i} + 1)|{i}.to(torch.int32)""".replace(
    "\n", "|"
).split("|")

# Expressions that promote a tensor {i} of integers or booleans.
MIXED = """{a} * {i}.sum()|{a} + {i}.to(torch.int32).sum()|{i}.to(torch.float32).mean() - {a}
{a} / (({i} > 0).sum() + 1)|torch.where({i}.sum() > 1, {a}, {i}.sum())
{a}.lerp({a} * 2, 0.5) * {i}.any()
torch.where({i}.any(), {a}, 0.5)|{a} + {i}.to(torch.uint8).sum() // 2|{a}.add({i}.sum(), alpha=-1)
torch.stack([{a}.sum(), {i}.sum()])""".replace("\n", "|").split("|")

KEEPING = {"torch.relu({a})", "torch.abs({a})", "-{a}", "{a}.detach()", "{a}.clone()"}


def floating(value: torch.Tensor) -> bool:
    """Whether a tensor has a floating dtype."""
    return value.is_floating_point()


def pick(
    draw: st.DrawFn, author: Author, fits: Callable[[torch.Tensor], bool] = floating
) -> str | None:
    """Draw the name of a value that fits; recent and unread values are drawn more often."""
    names = author.values(fits)
    if not names:
        return None
    late = [n for n in names if n not in author.used] or names[-4:]
    return draw(st.sampled_from(late[-4:] if draw(st.integers(0, 2)) else names))


def partner(
    draw: st.DrawFn, author: Author, a: str, fits: Callable[[torch.Tensor], bool] = floating
) -> str | None:
    """Draw the name of a value that can be broadcast against ``a``."""
    shape = author.value(a).shape

    def near(value: torch.Tensor) -> bool:
        try:
            torch.broadcast_shapes(shape, value.shape)
        except RuntimeError:
            return False
        return fits(value)

    return pick(draw, author, near)


def unary(draw: st.DrawFn, author: Author) -> Candidate | None:
    """Draw a line with a smooth function of one value."""
    a, template = pick(draw, author), draw(st.sampled_from(SMOOTH))
    return a and Candidate(template.format(a=a), (a,), exact=template in KEEPING)  # type: ignore[return-value]


def kinked(draw: st.DrawFn, author: Author) -> Candidate | None:
    """Draw a line with a function of one value that has kinks or jumps."""
    a, (template, kink) = pick(draw, author), draw(st.sampled_from(KINKED))
    if a is None:
        return None
    return Candidate(template.format(a=a), (a,), (kink.format(a=a),), exact=template in KEEPING)


def binary(draw: st.DrawFn, author: Author) -> Candidate | None:
    """Draw a line with a function of two values that broadcast."""
    a = pick(draw, author)
    b = a and partner(draw, author, a)
    template, kink = draw(st.sampled_from(TWO))
    if not a or not b:
        return None
    kinks = (kink.format(a=a, b=b),) if kink else ()
    return Candidate(template.format(a=a, b=b), (a, b), kinks)


def compared(draw: st.DrawFn, author: Author) -> Candidate | None:
    """Draw a line that compares two values, or a value with a number; the result is a mask."""
    a = pick(draw, author)
    b = a and draw(st.sampled_from([partner(draw, author, a), "0.25"]))
    if not a or not b:
        return None
    text = draw(st.sampled_from(COMPARED if b != "0.25" else COMPARED[:4])).format(a=a, b=b)
    return Candidate(text, (a,) if b == "0.25" else (a, b), (f"{a} - {b}",))


def masked(draw: st.DrawFn, author: Author) -> Candidate | None:
    """Draw a line that selects or changes elements by a mask."""
    a = pick(draw, author)
    m = a and partner(draw, author, a, lambda value: value.dtype is torch.bool)
    if not a or not m:
        return None
    template = draw(st.sampled_from(MASKED))
    return Candidate(template.format(a=a, m=m), (a, m), exact="where" in template)


def whole(draw: st.DrawFn, author: Author) -> Candidate | None:
    """Draw a line that computes with an int64 tensor, some by promotion to floating point."""
    i = pick(draw, author, lambda value: value.dtype is torch.int64)
    template = draw(st.sampled_from(WHOLE))
    return i and Candidate(template.format(i=i), (i,))  # type: ignore[return-value]


def mixed(draw: st.DrawFn, author: Author) -> Candidate | None:
    """Draw a line that combines a floating-point value with integers or booleans."""
    a = pick(draw, author)
    i = pick(draw, author, lambda value: value.dtype in (torch.int64, torch.bool))
    if a is None or i is None:
        return None
    return Candidate(draw(st.sampled_from(MIXED)).format(a=a, i=i), (a, i))


def random(draw: st.DrawFn, author: Author) -> Candidate | None:
    """Draw a line with dropout or, in float64, with random numbers of a value's shape."""
    a = pick(draw, author)
    if a is None:
        return None
    templates = ["F.dropout({a}, 0.3, self.training)", "F.dropout({a}, 0.5, True)"]
    if author.dtype == "float64":
        templates += ["{a} + torch.rand_like({a})", "{a} * torch.randn_like({a})"]
    return Candidate(draw(st.sampled_from(templates)).format(a=a), (a,), draws=True)
