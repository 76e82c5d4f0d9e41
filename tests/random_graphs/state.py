"""Lines that write in place: into intermediate values, through views, into buffers."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.random_graphs.author import Author, Candidate
from tests.random_graphs.elementwise import floating, partner, pick
from tests.random_graphs.program import Leaf

INPLACE = """{a}.mul_(0.5)|{a}.add_(1.25)|{a}.neg_()|{a}.tanh_()|{a}.fill_(0.75)|{a}.zero_()
{a}.add_({b})|{a}.sub_({b}, alpha=2)|{a}.mul_({b})|{a}.copy_({b})|{a}.clamp_(-40, 40)
{a}[...] = {b}""".replace("\n", "|").split("|")

THROUGH = """{a}[..., 0] = 1.5|{a}[..., :1].add_(2.0)|{a}[-1] *= 0.5|{a}.select(0, 0).fill_(0.25)
{a}[..., -1:].mul_(3)|{a}.transpose(0, -1)[0] = -0.5|{a}.flatten()[0]|{a}.narrow(0, 0, 1).sub_(1)
{a}[..., 1:] = {a}[..., :-1].clone()|{a}.unsqueeze(0)[:, 0].add_(0.5)|{a}[::2].neg_()
{a}.view(-1)[:1].mul_(0.25)|{a}.mT[..., 0].add_(0.5)|{a}.chunk(2, -1)[0].mul_(2)
{a}.unbind(0)[-1].zero_()
{a}.diagonal(0, 0, -1).add_(1.5)|{a}.masked_fill_({a} > 49, 0.0)|{a}[{a} > 49] = 1.0
{a}.squeeze(0).neg_()
{a}[..., None].expand(*{a}.shape, 1).mul_(0.5)|{a}.index_put_((torch.tensor([0]),), {a}[:1].clone())
{a}.index_add_(0, torch.tensor([0]), {a}[:1] * 0.5)|{a}[[0]] = 0.75""".replace("\n", "|").split("|")

BUFFERS = """{b}.mul_(0.9).add_({a}.detach().mean())|{b}.add_(1)|{b}.copy_({b} * 0.5)
self.{n} = {b} * 0.5 + 1|{b}[:1].add_({a}.detach().sum())
{b}.lerp_({b} + {a}.detach().mean(), 0.1)""".replace("\n", "|").split("|")


def inplace(draw: st.DrawFn, author: Author) -> Candidate | None:
    """Draw a line that writes into an intermediate value, directly or through a view."""
    names = author.values(floating)
    own = [name for name in names if not name.startswith("self.") and author.is_own(name)]
    if not own:
        return None
    a = draw(st.sampled_from(own[-4:]))
    shape = author.value(a).shape
    if shape and draw(st.booleans()):
        text = draw(st.sampled_from(THROUGH)).format(a=a)
        return Candidate(text, (a,), statement=True, writes=a)
    b = partner(draw, author, a, lambda value: floating(value) and _fits_into(value.shape, shape))
    if b is None:
        return None
    template = draw(st.sampled_from(INPLACE))
    reads = (a, b) if "{b}" in template else (a,)
    return Candidate(template.format(a=a, b=b), reads, statement=True, writes=a)


def _fits_into(small: tuple[int, ...], large: tuple[int, ...]) -> bool:
    pairs = zip(reversed(small), reversed(large), strict=False)
    return len(small) <= len(large) and all(a in (1, b) for a, b in pairs)


def buffer(draw: st.DrawFn, author: Author) -> Candidate | None:
    """Draw a line that reads or writes a buffer; later lines see the new value."""
    a = pick(draw, author)
    if a is None:
        return None
    buffers = [leaf for leaf in author.leaves if leaf.kind == "buffer"]
    if not buffers or draw(st.integers(0, 3)) == 0:
        name = f"b{len(buffers)}"
        shape = draw(st.sampled_from([(2,), (3,), (1,)]))
        author.leaf(Leaf(name, "buffer", shape, author.dtype, "normal"))
        return Candidate(f"self.{name} * {a}.mean()", (a,))
    name = draw(st.sampled_from(buffers)).name
    if draw(st.booleans()):
        return Candidate(f"self.{name}.clone()", (a,))
    text = draw(st.sampled_from(BUFFERS)).format(a=a, b=f"self.{name}", n=name)
    return Candidate(text, (a,), statement=True)
