"""After the zapp passes, a joint function has no binding that computes nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import tvm
from torch import nn
from transformers import GPT2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from tvm.relax import op

from tests.models import bert_layer
from tests.relax_helpers import build_main
from tests.superfluous import superfluous
from tests.thinned import but_slow, thinned
from tvmbridge.core.options import CompileOptions
from tvmbridge.core.types import PassRecord
from tvmbridge.differentiation.joint import derive
from tvmbridge.graph_capture.capture import capture


def bert(attention: str, p: float) -> nn.Module:
    """Return a layer of BERT with width 48, and dropout ``p`` everywhere."""
    rates = {"hidden_dropout_prob": p, "attention_probs_dropout_prob": p}
    return bert_layer(attention, width=48, heads=12, **rates)


def gpt2_block(attention: str, p: float) -> nn.Module:
    """Return a block of GPT-2 with width 64."""
    config = GPT2Config(n_embd=64, n_head=4, attn_pdrop=p, resid_pdrop=p, embd_pdrop=p)
    config._attn_implementation = attention
    block: nn.Module = GPT2Block(config, layer_idx=0)
    return block.train()


def joint_function(
    module: nn.Module, x: torch.Tensor, source: str
) -> tuple[tvm.relax.Function, list[PassRecord]]:
    """Return the joint function of ``module``, and the records of all passes."""
    records: list[PassRecord] = []
    args = (x.requires_grad_(),)
    captured = capture(module, args, needs_grad=True)
    derived = derive(module, args, {}, captured, CompileOptions(joint=source), records)
    return derived.joint.mod["joint"], records


# (attention, dropout) -> counts of bindings after the gradient, and after the zapp passes.
BERT_COUNTS = {
    ("eager", 0.0): (283, 170),
    ("sdpa", 0.1): (310, 182),
}


@pytest.mark.parametrize(("attention", "p"), thinned(BERT_COUNTS, 2))
def test_a_bert_layer_by_relax(attention: str, p: float) -> None:
    joint, records = joint_function(bert(attention, p), torch.randn(2, 14, 48), "relax")
    assert superfluous(joint) == []
    (gradient,) = (r for r in records if r.name == "Gradient")
    counts = gradient.bindings_after, records[-1].bindings_after
    assert counts == BERT_COUNTS[attention, p]


OTHERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "bert, aot": (lambda: bert("sdpa", 0.1), (2, 14, 48), "aot"),
    "bert fused, aot": (lambda: bert("sdpa", 0.0), (2, 14, 48), "aot"),
    "bert eager, aot": (lambda: bert("eager", 0.0), (2, 14, 48), "aot"),
    "gpt2": (lambda: gpt2_block("sdpa", 0.1), (2, 14, 64), "relax"),
    "gpt2, aot": (lambda: gpt2_block("eager", 0.1), (2, 14, 64), "aot"),
    "cnn": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.AvgPool2d(2),
            nn.Flatten(),
            nn.Linear(128, 10),
        ),
        (2, 3, 8, 8),
        "auto",
    ),
}


@pytest.mark.parametrize(
    "name", but_slow(OTHERS, "bert fused, aot", "bert eager, aot", "gpt2, aot")
)
def test_nothing_superfluous(name: str) -> None:
    make, shape, source = OTHERS[name]
    joint, _ = joint_function(make().train(), torch.randn(shape), source)
    assert superfluous(joint) == []


def test_the_checker_finds_what_it_looks_for() -> None:
    x = torch.randn(2, 3)
    planted = {
        "relax.ones_like": lambda x: op.ones_like(x),
        "relax.collapse_sum_to to the same shape": lambda x: op.collapse_sum_to(x, (2, 3)),
        "which is a sum over named axes": lambda x: op.collapse_sum_to(x, (3,)),
        "relax.broadcast_to to the same shape": lambda x: op.broadcast_to(x, (2, 3)),
        "relax.reshape to the same shape": lambda x: op.reshape(x, (2, 3)),
        "relax.reshape of relax.reshape": lambda x: op.reshape(op.reshape(x, (6,)), (3, 2)),
        "relax.astype to the same dtype": lambda x: op.astype(x, "float32"),
        "relax.permute_dims that keeps the order": lambda x: op.permute_dims(x, [0, 1]),
        "relax.permute_dims of": lambda x: op.permute_dims(op.permute_dims(x)),
        "relax.multiply with 1": lambda x: op.multiply(op.ones((2, 3), "float32"), x),
        "relax.add with 0": lambda x: op.add(x, op.zeros((3,), "float32")),
        "a plain copy": lambda x: x,
    }
    for reason, formula in planted.items():
        found = superfluous(build_main((x,), formula)["main"])
        assert any(reason in line for line in found), (reason, found)
