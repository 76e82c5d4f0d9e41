"""Further lines that write in place: through many kinds of views, into counters and buffers."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.random_graphs.author import Author, Candidate
from tests.random_graphs.elementwise import floating, pick
from tests.random_graphs.program import Leaf

VIEWS = """{a}[..., 1:] += {a}[..., :-1].clone()|{a}.view(-1)[::2].mul_(0.5)|{a}[0] = {a}[-1]
{a}.flatten()[1:].add_(1)|{a}.mT.mul_(2)|{a}[..., ::2] *= 0.5|{a}[..., -1] -= 1|{a}.T[0] += 0.25
{a}[{a} > 0] *= 0.5|{a}[:, None].sub_(1)|{a}.squeeze().abs_()|{a}.clamp_(min=-0.5)|{a}.t_()
{a}.unsqueeze_(0)|{a}.squeeze_()|{a}.transpose_(0, -1)|{a}.resize_({a}.shape)|{a} += {a}
{a}.copy_({a}.flip(0))|{a}.detach().mul_(2)|{a}.data.mul_(0.5)|{a}.view(-1).view({a}.shape).add_(1)
{a}.split(1, -1)[0].zero_()|{a}.swapdims(0, -1)[..., :1].neg_()|{a}.unbind(-1)[-1].add_({a}.mean())
{a}[0, ...].fill_(0.5)|{a}.movedim(0, -1)[..., 0] = 1|{a}.index_fill_(-1, torch.tensor([0]), 2.0)
{a}.as_strided((1,), (1,)).mul_(2)|{a}.mul_(True)|{a}.add_(2, alpha=3)|{a}.sub_({a}.mean().float())
{a}.scatter_(-1, torch.zeros_like({a}[..., :1], dtype=torch.int64), 0.5)|{a}.fill_({a}.sum())
{a}.masked_fill_({a} > 1, {a}.detach().mean())|{a}.requires_grad_()|{a}.diagonal(0, 0, -1).zero_()
torch.add({a}, 1, out={a}.detach().clone())|{a}.real.mul_(2)
{a}.register_hook(lambda g: g * 2)|{a}.retain_grad()|F.relu({a} - 0.3, inplace=True)
{a}.expand_as({a})[..., 0].add_(1)|{a}.set_({a} * 2)|{a}.zero_().add_(0.5)|{a}.data = {a} * 2
{a}.normal_()|{a}.uniform_()|{a}.narrow(-1, 0, 1).normal_()|F.dropout({a}, 0.5, True, inplace=True)
{a}.exponential_()|{a}.bernoulli_(0.5)""".replace("\n", "|").split("|")

SLICES = """{b}[:1].copy_({a}.detach().mean())|{b}[0] = {a}.detach().sum()|{b}[1:] += 1|{b} += 1
{b}.copy_(torch.roll({b}, 1))|{b}.data = {b} * 0.5|{b}.set_({b} + 1)|{b}[:] = {b}.flip(0)
{b}.mul_(0.5).add_({a}.detach().amax())|{b}.data.add_(1)|{b}.zero_()|{b}.data[:1] = 2
{b} = {b}.detach() * 0.5|{b}[-1:].lerp_({a}.detach().flatten()[:1], 0.5)
{b} = {a}.detach().mean()[None]|{b}.normal_()|{b}[..., 0] = {b}[..., -1]|{b} = {b}""".replace(
    "\n", "|"
).split("|")

COUNTS = """{c} += 1|{c}.add_(1)|{c}[0] += {a}.shape[0]|{c}.fill_(3)|{c} = {c} + 1|{c}.mul_(2)
{c}.copy_({c} + 1)|{c}.data += 1""".replace("\n", "|").split("|")

COUNTED = ["{a} + {c}", "{a} - {c}.sum()", "{a} / (1 + {c}.abs())", "{a} * ({c} > 0)"]


def through(draw: st.DrawFn, author: Author) -> Candidate | None:
    """Draw a line that writes through a view, also into arguments if the author allows it."""
    names = [n for n in author.values(floating) if not n.startswith("self.") and author.is_own(n)]
    if not names:
        return None
    a = draw(st.sampled_from(names[:3] + names[-3:]))
    text = draw(st.sampled_from(VIEWS)).format(a=a)
    draws = any(word in text for word in ("norm", "uniform", "dropout", "expon", "bern"))
    return Candidate(text, (a,), statement=True, writes=a, draws=draws)


def slices(draw: st.DrawFn, author: Author) -> Candidate | None:
    """Draw a line that reads a buffer, writes a part of it, or replaces it."""
    a = pick(draw, author)
    if a is None:
        return None
    buffers = [x for x in author.leaves if x.kind == "buffer" and x.values == "normal"]
    if not buffers:
        leaf = Leaf("b0", "buffer", (3,), author.dtype, "normal")
        return Candidate(f"{author.leaf(leaf)} + {a}.mean()", (a,))
    name = f"self.{draw(st.sampled_from(buffers)).name}"
    if draw(st.integers(0, 2)) == 0:
        return Candidate(f"{a}.sum() + {name}", (a,))
    text = draw(st.sampled_from(SLICES)).format(a=a, b=name)
    return Candidate(text, (a,), statement=True, draws="normal_" in text)


def counter(draw: st.DrawFn, author: Author) -> Candidate | None:
    """Draw a line that reads or increments an integer buffer."""
    a = pick(draw, author)
    if a is None:
        return None
    counters = [x for x in author.leaves if x.kind == "buffer" and x.values == "count"]
    if not counters:
        count = sum(x.kind == "buffer" for x in author.leaves)
        shape = draw(st.sampled_from([(), (1,)]))
        author.leaf(Leaf(f"b{count}", "buffer", shape, "int64", "count"))
        return None
    c = f"self.{counters[0].name}"
    if draw(st.booleans()):
        return Candidate(draw(st.sampled_from(COUNTED)).format(a=a, c=c), (a,))
    text = draw(st.sampled_from(COUNTS)).format(a=a, c=c)
    return Candidate(text, (a,), statement=True)
