"""Lines with several dtypes, zero-dimensional or empty tensors, or random draws of all kinds."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from tests.random_graphs.author import Author, Candidate
from tests.random_graphs.elementwise import floating, partner, pick

CASTS = """{a}.to(torch.float32)|{a}.double()|{a}.bfloat16()|{a}.half()|{a}.to(torch.bfloat16) * 2
{a}.float().half().double()|{a}.type(torch.float32)|{a}.to({b})|{a}.type_as({b})|{a}.float() + {b}
{a}.bfloat16() + {b}.half()|{a} * {b}.float()|torch.cat([{a}.flatten(), {b}.float().flatten()])
torch.where({a} > 49, {a}.float(), 1)|{a}.sum(dtype=torch.float32)|{a}.mean(-1, dtype=torch.float64)
{a}.softmax(-1, dtype=torch.float32)|{a}.cumsum(-1, dtype=torch.float32)
torch.stack([{a}.float().sum(), {a}.double().sum()])|{a}.bfloat16().sum()|{a}.half().mean()
{a} * torch.tensor(1.5, dtype=torch.float32)|{a}.float() * torch.tensor(1.5, dtype=torch.float64)
{a} + torch.tensor([1, 2, 3]).sum()|{a}.bfloat16() * torch.tensor(3.0)|{a}.prod(dtype=torch.float32)
torch.add({a}.float(), {b}.bfloat16(), alpha=2)""".replace("\n", "|").split("|")

# Expressions of a tensor {i} that is not floating-point.
ANY = """{i} * 2|{i} * 0.5|{i} + True|{i}.sum()|{i}.to(torch.uint8) + 1|{i}.to(torch.int16) * 2
{i}.to(torch.int8) - {i}.to(torch.uint8)|torch.logical_or({i}, {i} == 0)|{i} / 2
{i}.to(torch.int32) // 2|torch.true_divide({i}, 3)|{i}.to(torch.int16) + torch.tensor(3)
{i}.any()|{i}.all()|{i}.sum(dtype=torch.int32)|({i} > 0).float().mean()
torch.zeros_like({i}, dtype=torch.float32)
{i}.new_ones(2)|torch.result_type({i}, 1.0) == torch.float32 and {i} or {i} * 2
torch.where({i} > 0, 1, 0)|torch.where({i} > 0, 1.5, {i})|{i}.to(torch.int32) % 2
torch.arange({i}.numel()) * 0.5|torch.full(({i}.numel(),), 2) + {i}.flatten()|{i}.numel() + {i}
{i}.to(torch.float32).sqrt()|torch.tensor(2.5) + {i}|torch.bitwise_and({i}.int(), 1)
{i}.cumsum(0) if {i}.dim() else {i}|{i}.max() if {i}.numel() else {i}""".replace("\n", "|").split(
    "|"
)

EMPTY = """{a}[:0]|{a}[..., :0]|{a}[:0].sum()|{a}[:0].sum(0)|torch.cat([{a}, {a}[:0]])
{a}[:0] @ {a}[:0].mT|{a}.new_zeros(0, 3).sum(0)|{a}[..., :0].sum(-1)|{a}[..., :0].prod(-1)
{a}[:0].reshape(0, -1) if {a}.dim() == 2 else {a}[:0]|{a}.new_empty(0)|F.pad({a}[:0], (1, 1))
{a}[:0].cumsum(0)|torch.stack([{a}[:0], {a}[:0]])|{a}.split([0, {a}.shape[0]])[0]|{a}[..., :0].any()
F.linear({a}[:0], {a}.flatten(0, -2)) if {a}.dim() > 1 else {a}|{a}.narrow(-1, 0, 0)
torch.softmax({a}[:0], -1)|{a}[:0].mean()|{a}[[]]|{a}[:0].expand(0, *{a}.shape[1:])""".replace(
    "\n", "|"
).split("|")

SCALARS = """{a}.sum()|{a}.mean()|{a}.flatten()[0]|{a}.sum().reshape(())|{a}.sum() * {a}
{a}.sum()[None]|{a}.sum().expand({a}.shape)|torch.stack([{a}.sum(), {a}.mean()])
{a}.sum().unsqueeze(-1)|{a}.sum().sum(0)|{a}.mean().softmax(0)|{a}.mean().cumsum(0)|{a}.sum().squeeze()|{a}.sum().view(1)
torch.full((), 2.0, dtype={a}.dtype) * {a}|{a}.sum().sum(-1, keepdim=True)|{a}.mean().expand(2, 3)
{a}.sum().flatten()|{a}.mean().max(0)[0]|{a}.sum().clone()|{a}.sum() + {a}.mean()""".replace(
    "\n", "|"
).split("|")

DRAWS = """{a} + torch.randn({a}.shape, dtype={a}.dtype)|{a} * torch.rand(3, 1, dtype={a}.dtype)[0]
{a} * torch.bernoulli(torch.full_like({a}, 0.5))|{a} + torch.randint(0, 5, {a}.shape)|F.dropout({a})
{a}[torch.randperm({a}.shape[0])]|F.dropout({a}, 0.5, self.training)|F.alpha_dropout({a}, 0.3, True)
{a} + torch.empty_like({a}).normal_(0, 0.5)|{a} * torch.empty_like({a}).uniform_(-1, 1)
F.dropout1d({a}, 0.5, True)|torch.normal({a}, 0.5)|{a} + torch.rand(())|F.gumbel_softmax({a})
{a}.detach().clone().bernoulli_(0.5) + {a}|{a} * (torch.rand_like({a}) < 0.5)
{a} + torch.randint_like({a}, 3)|torch.rand_like({a})|{a} + torch.randn({a}.shape[-1]).to({a}.dtype)
F.rrelu({a}, training=True)|{a} * torch.empty_like({a}).exponential_().clamp(max=3)""".replace(
    "\n", "|"
).split("|")


def cast(draw: st.DrawFn, author: Author) -> Candidate | None:
    """Draw a line that casts floating-point values to another floating dtype."""
    a = pick(draw, author, lambda value: floating(value) and value.dim() > 0)
    b = a and partner(draw, author, a)
    if a is None or b is None:
        return None
    return Candidate(draw(st.sampled_from(CASTS)).format(a=a, b=b), (a, b))


def promoted(draw: st.DrawFn, author: Author) -> Candidate | None:
    """Draw a line that combines integers or booleans with numbers of other dtypes."""
    i = pick(draw, author, lambda value: not floating(value))
    if i is None:
        return None
    return Candidate(draw(st.sampled_from(ANY)).format(i=i), (i,))


def empty(draw: st.DrawFn, author: Author) -> Candidate | None:
    """Draw a line that creates an empty tensor, or computes with one."""
    a = pick(draw, author, lambda value: floating(value) and value.dim() > 0)
    if a is None:
        return None
    return Candidate(draw(st.sampled_from(EMPTY)).format(a=a), (a,))


def scalar(draw: st.DrawFn, author: Author) -> Candidate | None:
    """Draw a line that creates a zero-dimensional tensor, or computes with one."""
    a = pick(draw, author)
    return a and Candidate(draw(st.sampled_from(SCALARS)).format(a=a), (a,))  # type: ignore[return-value]


def drawn(draw: st.DrawFn, author: Author) -> Candidate | None:
    """Draw a line that draws random numbers, of all distributions."""
    a = pick(draw, author, lambda value: value.dtype in (torch.float64, torch.float32))
    if a is None:
        return None
    return Candidate(draw(st.sampled_from(DRAWS)).format(a=a), (a,), draws=True)
