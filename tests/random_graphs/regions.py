"""Lines with custom functions, checkpoints, autocast, Python branches, attributes and lists."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.random_graphs.author import Author, Candidate
from tests.random_graphs.elementwise import floating, partner, pick

CUSTOM = """functions.Scaled.apply({a}, 1.5)|functions.Reversed.apply({a})
functions.Clipped.apply({a})|functions.Apart.apply({a}, {b})|functions.Scaled.apply({a}, -2)
functions.Reversed.apply({a}).detach() + {a}|functions.Apart.apply({a}, {a}.detach())""".replace(
    "\n", "|"
).split("|")

PAIRS = """functions.Pair.apply({a}, {b})|functions.Lazy.apply({a})|functions.Pair.apply({a}, {a})
functions.Marked.apply({a})""".replace("\n", "|").split("|")

# Bodies of checkpointed functions of t.
BODIES = """torch.tanh(t) * 2|F.dropout(t, 0.3, self.training).sin()|torch.softmax(t, -1) * t
t * torch.rand_like(t)|(t * t).sum(-1, keepdim=True) + t|t.detach() * t|F.gelu(t).mean()
functions.Clipped.apply(t)""".replace("\n", "|").split("|")

AUTOCAST = """{a} @ {a}.mT|F.linear({a}, {a}.flatten(0, -2))|{a} * 2|F.softmax({a}, -1)
F.linear({a}, {a}.flatten(0, -2)).to({a}.dtype)|{a}.sum()|torch.matmul({a}.mT, {a}).double()
F.layer_norm({a} @ {a}.mT, ({a}.shape[-2],))""".replace("\n", "|").split("|")

# Conditions that Python evaluates: about attributes, arguments, modes and tensors.
ASKED = """self.training|torch.is_grad_enabled()|{a}.shape[0] > 2|{x}.requires_grad|{a}.dim() > 1
{x}.is_contiguous()|{x}.dtype is torch.float64|len({a}) == 1|{a}.numel() % 2|hasattr(self, 'extra')
len(self._forward_hooks) > 0|{x}.stride(0) == 1|{a}.size(-1) == 3""".replace("\n", "|").split("|")

SIDES = ["{a} * 2", "{a} + 1", "-{a}", "{a}.detach()", "torch.tanh({a})", "{a}.sum()", "{a}"]

LITERALS = ["True", "False", "2", "0", "1.5", "-0.5", "'sum'", "'mean'", "None", "(0,)", "[1, 2]"]

# Expressions that use an attribute or an argument {n} that is a number or a boolean.
NUMBERS = """{a} * {n}|{a} + {n}|{a} ** {n} if {n} == 2 else {a}|{a}.sum() if {n} else {a}
{a} if {n} is None else {a} * 0.5|F.dropout({a}, abs({n}) / 4, self.training)
{a} * (3 if isinstance({n}, bool) else 2)
torch.full_like({a}, {n}) + {a}|{a} / ({n} + 3)""".replace("\n", "|").split("|")

WORDS = """F.mse_loss({a}, {a} * 0.5, reduction={n})|{a}.sum() if {n} == 'sum' else {a}.mean()
getattr({a}, {n})()""".replace("\n", "|").split("|")

LISTS = ["{a} * len({n})", "{a} * sum({n})", "{a}.sum({n})", "{a} * (1 if 2 in {n} else 3)"]


CONTAINERS = """{a} + {l}[0].sum()|{a} * len({l})|torch.stack([t.sum() for t in {l}]) + {a}.sum()
sum(t.mean() for t in {l}) * {a}|{l}[-1] * 2|{l}[0]|{l}[0].mul_(2).sum() + {a}""".replace(
    "\n", "|"
).split("|")

FILLED = """{l}.append({a})|{l}.append({a} * 2)|{l}[0] = {a}|{l}.insert(0, {a}.sum())|{l}.pop()
{l}.extend([{a}, {a}])|{l}.reverse()|{l}[-1].add_(1)|del {l}[0]""".replace("\n", "|").split("|")

# Attributes that forward writes.
KEPT = """self.k0 = 2|self.k0 = {a}.shape[0]|self.k0 = 'done'
self.kept = {a}.detach()|self.k0 = {a}.dim()|self.k0 = self.training""".replace("\n", "|").split(
    "|"
)


def container(draw: st.DrawFn, author: Author) -> Candidate | None:
    """Draw a line that reads or changes an argument that is a list of tensors."""
    a = pick(draw, author)
    if a is None or not author.lists:
        return None
    name = draw(st.sampled_from(author.lists))
    if draw(st.booleans()):
        return Candidate(draw(st.sampled_from(CONTAINERS)).format(a=a, l=name), (a,))
    return Candidate(draw(st.sampled_from(FILLED)).format(a=a, l=name), (a,), statement=True)


def kept(draw: st.DrawFn, author: Author) -> Candidate | None:
    """Draw a line that assigns an attribute in forward."""
    a = pick(draw, author)
    text = draw(st.sampled_from(KEPT))
    return a and Candidate(text.format(a=a), (a,), statement=True)  # type: ignore[return-value]


def custom(draw: st.DrawFn, author: Author) -> Candidate | None:
    """Draw a line with a custom autograd function; some write in place, and some have jumps."""
    a = pick(draw, author)
    b = a and partner(draw, author, a)
    if a is None or b is None:
        return None
    kind = draw(st.integers(0, 7))
    if kind == 0 and author.is_own(a):
        return Candidate(f"functions.Written.apply({a})", (a,), writes=a)
    if kind == 1:
        away = f"{a} * 0.25 - torch.round({a} * 0.25 + 0.5) + 0.5"
        return Candidate(f"functions.StraightThrough.apply({a})", (a,), (away,))
    if kind < 5:
        text = draw(st.sampled_from(PAIRS)).format(a=a, b=b)
        return Candidate(text, (a, b), (a,) if "Marked" in text else (), results=2)
    return Candidate(draw(st.sampled_from(CUSTOM)).format(a=a, b=b), (a, b))


def checkpointed(draw: st.DrawFn, author: Author) -> Candidate | None:
    """Draw a line that calls a function or a submodule under ``checkpoint``."""
    a = pick(draw, author, lambda value: floating(value) and value.dim() > 0)
    if a is None:
        return None
    reentrant = draw(st.integers(0, 3)) == 0
    if author.submodules and draw(st.booleans()):
        name, text = draw(st.sampled_from(author.submodules))
        draws = "Dropout" in text
        call = f"checkpoint(self.{name}, {a}, use_reentrant={reentrant})"
        return Candidate(call, (a,), draws=draws)
    body = draw(st.sampled_from(BODIES))
    draws = "rand" in body or "dropout" in body
    return Candidate(
        f"checkpoint(lambda t: {body}, {a}, use_reentrant={reentrant})", (a,), draws=draws
    )


def autocast(draw: st.DrawFn, author: Author) -> Candidate | None:
    """Draw a line whose dtype autocast lowers; the caller puts it into an autocast region."""
    a = pick(draw, author, lambda value: floating(value) and value.dim() > 1)
    if a is None:
        return None
    return Candidate(draw(st.sampled_from(AUTOCAST)).format(a=a), (a,))


def branch(draw: st.DrawFn, author: Author) -> Candidate | None:
    """Draw a line with one of two expressions, which a Python condition selects."""
    a = pick(draw, author, lambda value: floating(value) and value.dim() > 0)
    if a is None:
        return None
    inputs = [x.name for x in author.leaves if x.kind == "input" and x.values == "normal"]
    question = draw(st.sampled_from(ASKED)).format(a=a, x=draw(st.sampled_from(inputs)))
    yes, no = (draw(st.sampled_from(SIDES)).format(a=a) for _ in range(2))
    return Candidate(f"({yes}) if {question} else ({no})", (a,))


def plain(draw: st.DrawFn, author: Author) -> Candidate | None:
    """Draw a line that uses an attribute or argument that is a number, a string or a list."""
    a = pick(draw, author, lambda value: floating(value) and value.dim() > 0)
    if a is None:
        return None
    if author.numbers and draw(st.booleans()):
        name, literal = draw(st.sampled_from(author.numbers)), "2"
    elif author.attributes and draw(st.booleans()):
        known, literal = draw(st.sampled_from(author.attributes))
        name = f"self.{known}"
    else:
        literal = draw(st.sampled_from(LITERALS))
        name = author.attribute(literal)
    templates = WORDS if "'" in literal else LISTS if literal[0] in "([" else NUMBERS
    text = draw(st.sampled_from(templates)).format(a=a, n=name)
    return Candidate(text, (a,), draws="dropout" in text)
