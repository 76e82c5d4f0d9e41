"""Lines that sum over dimensions: reductions, norms, matrix products."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.random_graphs.author import Author, Candidate
from tests.random_graphs.elementwise import floating, pick
from tests.random_graphs.program import Leaf

SMOOTH = """{a}.sum({d}, keepdim={k})|{a}.mean({d}, keepdim={k})|{a}.logsumexp({d}, keepdim={k})
torch.softmax({a}, {d})|torch.log_softmax({a}, {d})|{a}.cumsum({d})|{a}.sum()|{a}.mean()
{a}.var({d}, correction=0, keepdim={k})|{a}.var({d}, keepdim={k})|F.softmin({a}, {d})
torch.logcumsumexp({a}, {d})|{a}.square().sum({d}, keepdim={k})|{a}.sum((0, -1))|{a}.mean((0,))
F.layer_norm({a}, {a}.shape[-1:], eps=0.1)|F.rms_norm({a}, {a}.shape[-1:], eps=0.1)
F.cosine_similarity({a}, {a} + 1, dim={d}, eps=1e-3)|{a}.prod({d}, keepdim={k})
{a}.sum({d}, keepdim={k}) / {a}.shape[{d}]|{a} - {a}.mean({d}, keepdim=True)
{a}.softmax({d}).cumsum({d})
F.group_norm({a}.reshape(1, 1, -1), 1, eps=0.1)
{a} / {a}.square().sum({d}, keepdim=True).add(0.5).sqrt()""".replace("\n", "|").split("|")

# Functions that depend on the order of elements, which rounding must not decide.
SORTED = """{a}.amax({d}, keepdim={k})|{a}.amin({d}, keepdim={k})|{a}.max({d})[0]|{a}.argmax({d})
{a}.sort({d})[0]|{a}.topk(1, {d})[0]|{a}.max({d}, keepdim={k})[1]|{a}.max()|{a}.cummax({d})[0]
{a}.median({d})[0]""".replace("\n", "|").split("|")

NORMS = ["{a}.norm(dim={d}, keepdim={k})", "F.normalize({a}, dim={d})", "{a}.std({d}, keepdim={k})"]

PRODUCTS = """{a} @ {a}.mT|{a}.mT @ {a}|torch.einsum('...i,...j->...ij', {a}, {a})
torch.matmul({a}, {a}[..., -1, :, None])|torch.bmm({a}.flatten(0, -3), {a}.flatten(0, -3).mT)
torch.einsum('...ij,...kj->...ik', {a}, {a} * 0.5)|F.linear({a}, {a}.flatten(0, -2))
F.conv2d({a}.reshape(1, 1, -1, {a}.shape[-1]), {a}.reshape(1, 1, -1, {a}.shape[-1])[..., :1, :1])
{a}.mT.softmax(-1) @ {a}
torch.addmm({a}[..., 0].flatten()[:1], {a}.flatten(0, -2), {a}.flatten(0, -2).mT)
F.scaled_dot_product_attention({a}[None], {a}[None] * 0.5, {a}[None] + 1)""".replace(
    "\n", "|"
).split("|")


def reduced(draw: st.DrawFn, author: Author) -> Candidate | None:
    """Draw a line with a smooth reduction, or a norm over one dimension."""
    a = pick(draw, author, lambda value: floating(value) and value.dim() > 0)
    if a is None:
        return None
    rank = author.value(a).dim()
    d, k = draw(st.integers(-rank, rank - 1)), draw(st.booleans())
    if draw(st.integers(0, 7)) == 0:
        far = (f"{a}.norm(dim={d})", f"{a}.var({d}, correction=0)")
        text = draw(st.sampled_from(NORMS)).format(a=a, d=d, k=k)
        return Candidate(text, (a,), singular=far)
    return Candidate(draw(st.sampled_from(SMOOTH)).format(a=a, d=d, k=k), (a,))


def ordered(draw: st.DrawFn, author: Author) -> Candidate | None:
    """Draw a line whose result depends on the order of elements, such as a maximum or a sort.

    No two elements may be equal, except for ``amax``, ``amin`` and a maximum of all elements, whose
    gradients ties share.
    """
    a = pick(draw, author, lambda value: floating(value) and value.dim() > 0)
    if a is None or author.special:
        return None
    rank = author.value(a).dim()
    d, k = draw(st.integers(-rank, rank - 1)), draw(st.booleans())
    template = draw(st.sampled_from(SORTED))
    whole = template == "{a}.max()"
    gaps = (f"{a}.flatten().sort()[0].diff()" if whole else f"{a}.sort({d})[0].diff(dim={d})",)
    shared = "amax" in template or "amin" in template or whole
    text = template.format(a=a, d=d, k=k)
    return Candidate(text, (a,), kinks=gaps if shared else (), singular=() if shared else gaps)


def product(draw: st.DrawFn, author: Author) -> Candidate | None:
    """Draw a line with a matrix product of a value with itself, or with another that fits."""
    a = pick(draw, author, lambda value: floating(value) and value.dim() > 1)
    if a is None:
        return None
    width = author.value(a).shape[-1]
    if draw(st.booleans()):
        b = pick(draw, author, lambda v: floating(v) and v.dim() in (1, 2) and v.shape[0] == width)
        return b and Candidate(f"{a} @ {b}", (a, b))  # type: ignore[return-value]
    return Candidate(draw(st.sampled_from(PRODUCTS)).format(a=a), (a,))


def layer(draw: st.DrawFn, author: Author) -> Candidate | None:
    """Draw a line with a functional layer; its parameters are new, reused, or tied to others."""
    a = pick(draw, author, lambda value: floating(value) and value.dim() > 0 and value.numel() > 0)
    if a is None:
        return None
    width = author.value(a).shape[-1]
    kind = draw(st.sampled_from(["linear", "layer_norm", "batch_norm", "conv1d", "linear"]))
    if kind == "batch_norm":
        return _batch_norm(author, a)
    shape = {"linear": (draw(st.integers(1, 4)), width), "layer_norm": (width,)}.get(
        kind, (2, 1, 2)
    )
    weight = _parameter(draw, author, shape)
    if kind == "conv1d":
        return Candidate(f"F.conv1d({a}.reshape(-1, 1, {width}), {weight}, padding=1)", (a, weight))
    bias = _parameter(draw, author, shape[:1])
    text = {
        "linear": f"F.linear({a}, {weight}, {bias})",
        "layer_norm": f"F.layer_norm({a}, ({width},), {weight}, {bias}, 0.05)",
    }[kind]
    return Candidate(text, (a, weight, bias))


def _parameter(draw: st.DrawFn, author: Author, shape: tuple[int, ...]) -> str:
    known = [x for x in author.leaves if x.kind == "parameter" and x.shape == shape]
    name = f"p{sum(x.kind == 'parameter' for x in author.leaves)}"
    if known and draw(st.booleans()):
        old = known[-1]
        if draw(st.booleans()):
            return f"self.{old.name}"
        tied = old.tied or old.name
        return author.leaf(
            Leaf(name, "parameter", shape, old.dtype, old.values, old.requires_grad, tied)
        )
    trained = draw(st.integers(0, 5)) > 0
    return author.leaf(Leaf(name, "parameter", shape, author.dtype, "normal", trained))


def _batch_norm(author: Author, a: str) -> Candidate | None:
    value = author.value(a)
    if value.dim() < 2 or value.numel() == value.shape[1]:
        return None
    count = sum(x.kind == "buffer" for x in author.leaves)
    shape = (value.shape[1],)
    mean = author.leaf(Leaf(f"b{count}", "buffer", shape, author.dtype, "normal"))
    variance = f"torch.ones({shape[0]}, dtype={a}.dtype)"
    return Candidate(f"F.batch_norm({a}, {mean}, {variance}, training=self.training)", (a, mean))
