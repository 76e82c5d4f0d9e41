"""Lines that call submodules: layers with parameters, statistics or dropout, shared or tied."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from tests.random_graphs.author import Author, Candidate
from tests.random_graphs.elementwise import pick

# {n} is the extent of the last dimension, {c} that of the second.
LAST = """nn.Linear({n}, 3)|nn.Linear({n}, 3, bias=False)|nn.LayerNorm({n})|nn.RMSNorm({n}, eps=0.1)
nn.Sequential(nn.Linear({n}, 4), nn.Tanh(), nn.Linear(4, 2))|nn.Identity()|nn.GELU()
nn.Dropout(0.25)|nn.Sequential(nn.Dropout(0.5), nn.Linear({n}, 2))|nn.Softmax(-1)
nn.utils.parametrizations.weight_norm(nn.Linear({n}, 2))
nn.LayerNorm({n}, elementwise_affine=False)|nn.ReLU(inplace=True)|nn.Dropout(0.5, inplace=True)
nn.Linear({n}, {n})""".replace("\n", "|").split("|")

CHANNELS = """nn.BatchNorm1d({c})|nn.BatchNorm1d({c}, momentum=0.3, affine=False)|nn.PReLU({c})
nn.BatchNorm1d({c}, track_running_stats=False)|nn.GroupNorm(1, {c})
nn.BatchNorm1d({c}, momentum=None)|nn.InstanceNorm1d({c}, affine=True)
nn.Conv1d({c}, 2, 2, padding=1)|nn.Dropout1d(0.5)""".replace("\n", "|").split("|")

PICTURES = """nn.Conv2d({c}, 2, 2, padding=1)|nn.BatchNorm2d({c})|nn.Dropout2d(0.5)
nn.MaxPool2d(2, 1)|nn.AvgPool2d(2, 1)|nn.Conv2d({c}, {c}, 1, groups={c})
nn.ConvTranspose2d({c}, 2, 2)
nn.AdaptiveAvgPool2d(1)|nn.Sequential(nn.Conv2d({c}, 3, 1), nn.BatchNorm2d(3), nn.ReLU())
nn.Upsample(scale_factor=2)""".replace("\n", "|").split("|")

CAST = {"float64": ".double()", "float32": "", "bfloat16": ".bfloat16()"}


def layer(draw: st.DrawFn, author: Author) -> Candidate | None:
    """Draw a line that calls a new submodule, or an earlier one again."""
    dtype = author.dtype
    a = pick(draw, author, lambda v: 0 < v.dim() < 5 and v.numel() > 0 and _is_of(v, dtype))
    if a is None:
        return None
    if author.submodules and draw(st.integers(0, 3)) == 0:
        name, text = draw(st.sampled_from(author.submodules))
        return Candidate(f"self.{name}({a})", (a,), draws="Dropout" in text)
    shape = author.value(a).shape
    templates = {1: LAST, 2: LAST + CHANNELS[:4], 3: LAST + CHANNELS}.get(len(shape), PICTURES)
    template = draw(st.sampled_from(templates))
    text = template.format(n=shape[-1], c=shape[1] if len(shape) > 1 else 1)
    writes = a if "inplace" in text else ""
    if writes and not author.is_own(a):
        return None
    name = author.submodule(f"({text}){CAST[dtype]}")
    kinks = (a,) if "ReLU" in text else ()
    return Candidate(f"{name}({a})", (a,), kinks=kinks, writes=writes, draws="Dropout" in text)


def _is_of(value: torch.Tensor, dtype: str) -> bool:
    return str(value.dtype) == f"torch.{dtype}"


def tied(draw: st.DrawFn, author: Author) -> Candidate | None:
    """Draw a line that calls a linear layer by a second name, or uses its weight directly."""
    linear = [n for n, text in author.submodules if text.startswith("(nn.Linear")]
    if not linear:
        return None
    chosen = draw(st.sampled_from(linear))
    weight = author.value(f"self.{chosen}.weight")
    a = pick(draw, author, lambda v: v.dim() > 0 and v.shape[-1] == weight.shape[1])
    if a is None:
        return None
    if draw(st.booleans()):
        return Candidate(f"{a} @ self.{chosen}.weight.mT", (a,))
    return Candidate(f"{author.submodule(f'self.{chosen}')}({a})", (a,))
