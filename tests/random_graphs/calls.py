"""Draw the calls of a module, and the changes to the module between them."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.random_graphs.author import Author
from tests.random_graphs.program import Call, Leaf

# Expressions with the values of {x} in another memory layout, or at another offset.
LAYOUTS = """{x}.mT.contiguous().mT|{x}.repeat_interleave(2, -1)[..., ::2]|{x}[:1].expand({x}.shape)
torch.cat([{x}.flatten()[:1], {x}.flatten()])[1:].view({x}.shape)|{x}[None].clone()[0]
{x}.transpose(0, -1).contiguous().transpose(0, -1)|torch.stack([{x}, {x}])[1]
{x}.clone(memory_format=torch.channels_last) if {x}.dim() == 4 else {x}""".replace("\n", "|").split(
    "|"
)

# Other values for the argument {x}.
OTHERS = """{x}.detach()|{x} * 1|{x}.detach().requires_grad_()|{x}.float()|{x}.double()|{x}.half()
{x}[..., None]|{x}[0]|{x}.view({x}.shape)|{x}.clone()|{y}|{y}.expand_as({x})|{x}[..., :1]
nn.Parameter({x}.detach())|{x}.tolist()|None|1.5|{y}.detach()|{x}.to(torch.int64)""".replace(
    "\n", "|"
).split("|")

# Expressions that change the number of rows, applied to all arguments with rows alike.
ROWS = """torch.cat([{x}, {x}])|{x}[:1]|{x}[1:]|{x}[:0]|torch.cat([{x}, {x}[:1]])|{x}[::2]
{x}.repeat_interleave(2, 0)""".replace("\n", "|").split("|")

BEFORE = """module.p0.requires_grad_(False)|module.p0.requires_grad_(True)|module.p0.data.mul_(1.5)
module.p0 = nn.Parameter(module.p0.detach() * 2)|module.p0.data = module.p0.data.clone() + 1
module.p0.register_hook(lambda g: g * 2) if module.p0.requires_grad else None|module.zero_grad()
module.register_forward_hook(lambda m, a, r: r)|module.zero_grad(set_to_none=False)
module.register_forward_pre_hook(lambda m, a: None)|torch.optim.SGD(module.parameters(), 0.1).step()
torch.optim.Adam(module.parameters(), 0.01).step()|module.requires_grad_(False)
module.requires_grad_(True)|module.register_buffer('extra', torch.ones(1))|module.eval()
module.load_state_dict(module.state_dict())|module.p0 = nn.Parameter(module.p0[..., :1].detach())
module.load_state_dict({k: v.clone() for k, v in module.state_dict().items()}, assign=True)
module.p0.data = module.p0.data.repeat_interleave(2, -1)[..., ::2]|torch.randn(3)
module.p0.grad = torch.ones_like(module.p0)|module = copy.deepcopy(module)|nn.init.ones_(module.p0)
[p.detach_() for p in module.parameters()]|module.double()|module.float()""".replace(
    "\n", "|"
).split("|")

OF_SUBMODULES = """{s}.eval()|{s}.train()|{s}.requires_grad_(False)|{s}.requires_grad_(True)
{s}.register_forward_hook(lambda m, a, r: r * 2)|{s}.register_forward_pre_hook(lambda m, a: None)
{s}.p = 0.1|{s}.momentum = 0.3|{s}.eps = 0.2|{s}.weight = nn.Parameter({s}.weight.detach() * 2)
{s}.bias = None|{s} = nn.Identity()|{s}.train(not {s}.training)
{s}.weight.data = {s}.weight.data.mT.contiguous().mT|{s}.forward = lambda x: x * 3
{s}.register_full_backward_hook(lambda m, i, o: None)|{s}.weight.data.mul_(2)
{s}.__class__ = type('Other', (type({s}),), {{}})|{s} = {s}""".replace("\n", "|").split("|")

OF_BUFFERS = """{b}.fill_(2)|{b} = {b} * 2|{b}.add_(1)|{b} = {b}.clone()|{b} = {b}.float()
{b} = torch.ones(2)|{b} = None""".replace("\n", "|").split("|")

LISTS = """[{x}, {x} * 2]|[{x}.detach()]|[{x}.clone(), {x}.clone(), {x}.detach()]|({x}, {x})|[]
[{x}, None]|[{x}.detach().clone(), 2]""".replace("\n", "|").split("|")

# Statements between forward and backward.
AFTER = """made[0].detach().mul_(2)|made[-1].detach().add_(1)|made[0].mul_(3)|made[-1].neg_()
made[0].register_hook(lambda g: g * 2)|made[-1].retain_grad()|given[0].detach().add_(1)
module.p0.detach().mul_(2)
[b.zero_() for b in module.buffers()]|module.eval()|module.train()|torch.rand(2)|made[0][...] = 0
made[-1].register_hook(lambda g: g.clamp(-0.1, 0.1))
module.zero_grad()|module.requires_grad_(False)|given[-1].mul_(2)|made[0].detach_()""".replace(
    "\n", "|"
).split("|")

LITERALS = [
    "True",
    "False",
    "2",
    "0",
    "1.5",
    "-0.5",
    "'sum'",
    "'mean'",
    "None",
    "(0,)",
    "[1, 2]",
    "1",
]


@st.composite
def layouts(draw: st.DrawFn, leaf: Leaf, *, written: bool) -> str:
    """Draw an expression with the values of ``leaf`` for an argument, in some memory layout.

    If forward may write into the argument (``written``), the expression is no leaf of autograd.
    """
    text = leaf.name
    if leaf.values == "normal" and leaf.shape and draw(st.integers(0, 2)) == 0:
        text = draw(st.sampled_from(LAYOUTS if len(leaf.shape) > 1 else LAYOUTS[1:]))
        text = text.format(x=leaf.name)
    if written and leaf.requires_grad:
        return f"({text}).detach()" if draw(st.integers(0, 3)) else f"({text}) * 1"
    return text


@st.composite
def calls(draw: st.DrawFn, author: Author, given: list[str]) -> list[Call]:
    """Draw one to five calls; the module is dispatched with a sample like the first call."""
    first = Call(
        tuple(given), training=draw(st.booleans()), used=draw(_used()), after=draw(_after())
    )
    if not first.training and draw(st.booleans()):
        first = Call(tuple(given), training=False, gradients=draw(st.sampled_from(MODES)))
    found = [first]
    for number in range(draw(st.sampled_from([0, 1, 2, 2, 3, 4]))):
        found.append(draw(_later(author, given, number + 1, found[-1])))
    return found


MODES = ["no_grad", "inference", "no_grad"]


@st.composite
def _later(draw: st.DrawFn, author: Author, given: list[str], seed: int, last: Call) -> Call:
    before = [draw(_before(author)) for _ in range(draw(st.sampled_from([0, 1, 1, 1, 2])))]
    change = draw(st.sampled_from(["none", "none", "none", "layout", "other", "rows", "rows"]))
    training = last.training if draw(st.integers(0, 2)) else not last.training
    return Call(
        tuple(draw(_arguments(author, given, change))),
        tuple(before),
        draw(_after()),
        seed,
        training,
        draw(st.sampled_from(["grad", "grad", "grad", *MODES])),
        draw(_used()),
        dispatched=change != "none" and draw(st.integers(0, 2)) > 0,
        twice=draw(st.integers(0, 5)) == 0,
    )


@st.composite
def _after(draw: st.DrawFn) -> tuple[str, ...]:
    return (draw(st.sampled_from(AFTER)),) if draw(st.integers(0, 3)) == 0 else ()


def _used() -> st.SearchStrategy[tuple[int, ...] | None]:
    some = st.lists(st.integers(0, 3), max_size=2, unique=True).map(lambda x: tuple(sorted(x)))
    return st.one_of(st.none(), st.none(), some)


@st.composite
def _arguments(draw: st.DrawFn, author: Author, given: list[str], change: str) -> list[str]:
    leaves = [leaf for leaf in author.leaves if leaf.kind == "input"]
    tensors = [leaf for leaf in leaves if leaf.is_tensor]
    changed = list(given)
    rows = draw(st.sampled_from(ROWS))
    for place, leaf in enumerate(leaves):
        x, y = leaf.name, draw(st.sampled_from(tensors)).name
        if leaf.values == "number":
            if draw(st.booleans()):
                changed[place] = draw(st.sampled_from(LITERALS))
        elif leaf.values == "list":
            if change != "none":
                changed[place] = draw(st.sampled_from(LISTS)).format(x=y)
        elif change == "rows" and leaf.shape and leaf.values != "index":
            changed[place] = rows.format(x=x)
        elif change == "layout":
            changed[place] = draw(layouts(leaf, written=author.writes_inputs))
        elif change == "other" and draw(st.booleans()):
            changed[place] = draw(st.sampled_from(OTHERS)).format(x=x, y=y)
    return changed


@st.composite
def _before(draw: st.DrawFn, author: Author) -> str:
    pools = [BEFORE]
    if author.attributes:
        name = draw(st.sampled_from(author.attributes))[0]
        pools += [[f"module.{name} = {literal}" for literal in LITERALS]] * 2
    if author.submodules:
        name = draw(st.sampled_from(author.submodules))[0]
        pools += [[text.format(s=f"module.{name}") for text in OF_SUBMODULES]] * 2
    buffers = [leaf.name for leaf in author.leaves if leaf.kind == "buffer"]
    if buffers:
        name = draw(st.sampled_from(buffers))
        pools.append([text.format(b=f"module.{name}") for text in OF_BUFFERS])
    return draw(st.sampled_from(draw(st.sampled_from(pools))))
