"""Lines that move elements: views, slices, concatenation, padding, indexing."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.random_graphs.author import Author, Candidate
from tests.random_graphs.elementwise import floating, pick

# Expressions of {a} with at least one dimension; {d} is a dimension, {e} the same as a negative.
MOVES = """{a}[..., -1]|{a}[..., 0]|{a}[..., 1:]|{a}[..., :-1]|{a}[::2]|{a}[..., None]|{a}.flip({d})
{a}.unsqueeze({e})|{a}.squeeze({d})|{a}.select({e}, -1)|{a}.transpose({d}, -1)|{a}.flatten()
{a}.narrow({d}, 0, 1)|{a}.movedim({d}, 0)|torch.stack([{a}, {a} * 2], {e})|torch.roll({a}, 1, {d})
torch.cat([{a}, {a}], {e})|torch.cat([{a}, -{a}, {a}], {d})|F.pad({a}, (1, 2), value=0.5)
F.pad({a}, (0, -1))|{a}.repeat_interleave(2, {d})|{a}.unbind({d})[-1]|{a}.chunk(2, {e})[-1]
{a}.split(1, {d})[0]|{a}.expand(2, *{a}.shape)|torch.tile({a}, (2,))|{a}.reshape(-1)
{a}.reshape(-1, {a}.shape[-1])|{a}.contiguous()|{a}.unsqueeze(0)|{a}.view({a}.shape + (1,))
{a}.index_select({d}, torch.tensor([0, 0]))|{a}.diff(dim={d})|{a}[[0, -1]]|{a}.flatten()[0]
torch.cat([{a}[:0], {a}])
{a}[:0].sum(0)|{a}[..., :0]|torch.stack({a}.unbind({d}), {e})
{a}.split_with_sizes([{a}.shape[{d}]], {d})[0]
{a}.unflatten({d}, (1, -1))|{a}.tensor_split(2, {d})[0]""".replace("\n", "|").split("|")

# Expressions of {a} with at least two dimensions.
PLANES = """{a}.mT|torch.tril({a})|torch.triu({a}, 1)|{a}.diagonal(0, -2, -1)|{a}.swapaxes(0, -1)
{a}[:, -1]|{a}[-1, ..., 0]|{a}.flatten(-2)|{a}.permute(*range(1, {a}.dim()), 0)|{a}[:, :1]
F.pad({a}, (1, 0, 0, 1))|{a}.mT.contiguous()|{a}.mT.reshape(-1)""".replace("\n", "|").split("|")

# Expressions with a one-dimensional index {i} of values 0 and 1, along a dimension of size >= 2.
INDEXED = """{a}.index_select({d}, {i})|{a}.index_add({d}, {i}, {a}.index_select({d}, {i}))
{a}.index_copy({d}, {i}[:1], {a}.index_select({d}, {i}[1:2]))|{a}.transpose(0, {d})[{i}]
{a}.index_fill({d}, {i}[:1], 0.5)|{a}.transpose(0, {d}).index_put(({i}[:1],), torch.ones_like({b}))
torch.take_along_dim({a}, {a}.argsort({d}) * 0 + {i}[0], {d})""".replace("\n", "|").split("|")


def move(draw: st.DrawFn, author: Author) -> Candidate | None:
    """Draw a line that moves elements; most such lines do not change their values."""
    a = pick(draw, author, lambda value: value.dim() > 0)
    if a is None:
        return None
    rank = author.value(a).dim()
    d = draw(st.integers(0, rank - 1))
    template = draw(st.sampled_from(MOVES + PLANES if rank > 1 else MOVES))
    exact = "*" not in template and "diff" not in template
    return Candidate(template.format(a=a, d=d, e=d - rank), (a,), exact=exact)


def regroup(draw: st.DrawFn, author: Author) -> Candidate | None:
    """Draw a line that reshapes a value to two dimensions, in half of the cases permuted first."""
    a = pick(draw, author, lambda value: value.numel() > 1)
    if a is None:
        return None
    value = author.value(a)
    rows = draw(st.sampled_from([n for n in range(1, 13) if value.numel() % n == 0]))
    order = draw(st.permutations(range(value.dim())))
    moved = f"{a}.permute({', '.join(map(str, order))})" if draw(st.booleans()) else a
    return Candidate(f"{moved}.reshape({rows}, -1)", (a,), exact=True)


def joined(draw: st.DrawFn, author: Author) -> Candidate | None:
    """Draw a line that concatenates or stacks two values of the same shape."""
    a = pick(draw, author, lambda value: floating(value) and value.dim() > 0)
    if a is None:
        return None
    shape = author.value(a).shape
    b = pick(draw, author, lambda value: floating(value) and value.shape == shape)
    d = draw(st.integers(-len(shape), len(shape) - 1))
    function = draw(st.sampled_from(["torch.cat", "torch.stack"]))
    return b and Candidate(f"{function}([{a}, {b}], {d})", (a, b), exact=True)  # type: ignore[return-value]


def indexed(draw: st.DrawFn, author: Author) -> Candidate | None:
    """Draw a line that selects or writes slices along one dimension by an index tensor."""
    a = pick(draw, author, lambda value: floating(value) and 2 in [min(n, 2) for n in value.shape])
    if a is None:
        return None
    indices = [leaf.name for leaf in author.leaves if leaf.values == "index"]
    if not indices:
        return None
    i = draw(st.sampled_from(indices))
    value = author.value(a)
    d = draw(st.sampled_from([d for d, n in enumerate(value.shape) if n > 1]))
    b = f"{a}.transpose(0, {d})[:1]"
    return Candidate(draw(st.sampled_from(INDEXED)).format(a=a, b=b, i=i, d=d), (a, i))


def gathered(draw: st.DrawFn, author: Author) -> Candidate | None:
    """Draw a line with an embedding, a gather or a scatter over a two-dimensional value."""
    table = pick(draw, author, lambda v: floating(v) and v.dim() == 2 and v.shape[0] > 1)
    indices = [leaf.name for leaf in author.leaves if leaf.values == "index"]
    if table is None or not indices:
        return None
    i = draw(st.sampled_from(indices))
    templates = [
        "F.embedding({i}, {a})",
        "torch.gather({a}, 0, {i}[:1, None].expand(1, {a}.shape[1]))",
        "F.embedding({i}[None], {a})",
        "torch.zeros_like({a}).scatter_add(0, {i}[:1, None].expand(1, {a}.shape[1]), {a})",
    ]
    text = draw(st.sampled_from(templates)).format(a=table, i=i)
    return Candidate(text, (table, i), exact=True)
