"""The memory of a training step, counted in bytes: no more than eager PyTorch's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional
from tvm import relax
from tvm.relax import op

from benchmarks.modules import ResNet
from benchmarks.residuals import eager_bytes
from tests.models import bert_model
from tvmbridge import CompileOptions, explain
from tvmbridge.compiler.step_memory import StepMemory, peak_bytes
from tvmbridge.passes.relax.fuse_cross_entropy import FuseCrossEntropy

# As on a GPU.
OPTIONS = CompileOptions(residual_policy="keep_operands", extra_passes=(FuseCrossEntropy(),))
WIDTH, VOCABULARY, TOKENS = 32, 512, 64
# Row-wise values beside the logits (maxima and logarithms), which eager PyTorch does not save.
TOLERANCE = 1.01


class Learning(nn.Module):
    """A model with its loss inside, under autocast to ``dtype``; None: without autocast."""

    def __init__(self, model: nn.Module, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.model, self.dtype = model, dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cast = torch.autocast("cpu", self.dtype) if self.dtype else contextlib.nullcontext()
        with cast:
            if x.is_floating_point():
                classes = torch.zeros(len(x), dtype=torch.long)
                return functional.cross_entropy(self.model(x), classes)
            loss: torch.Tensor = self.model(input_ids=x, labels=x).loss
            return loss


def _tokens(model: nn.Module) -> tuple[nn.Module, torch.Tensor]:
    return model.train(), torch.randint(VOCABULARY, (4, TOKENS))


def bert() -> tuple[nn.Module, torch.Tensor]:
    """Return a BERT with a head for masked words."""
    sizes = {"vocab_size": VOCABULARY, "intermediate_size": 4 * WIDTH}
    return _tokens(bert_model("BertForMaskedLM", width=WIDTH, layers=2, **sizes))


def gpt2() -> tuple[nn.Module, torch.Tensor]:
    """Return a GPT-2."""
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=2, n_head=2, n_positions=TOKENS
    )
    config.use_cache = False
    return _tokens(transformers.GPT2LMHeadModel(config))


def llama() -> tuple[nn.Module, torch.Tensor]:
    """Return a Llama."""
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=88,
    )
    config.use_cache = False
    return _tokens(transformers.LlamaForCausalLM(config))


def resnet() -> tuple[nn.Module, torch.Tensor]:
    """Return a small ResNet, and images."""
    return ResNet(width=8, stages=2, blocks=1).train(), torch.randn(4, 3, 16, 16)


def _counted(
    make: Callable[[], tuple[nn.Module, torch.Tensor]],
    dtype: torch.dtype | None,
    options: CompileOptions,
) -> tuple[StepMemory, int, nn.Module]:
    torch.manual_seed(0)
    model, x = make()
    module = Learning(model, dtype)
    report = explain(module, x, options=options, memory=True)
    assert report.ok, report.reason
    assert report.memory is not None
    assert report.memory.residuals == report.residual_bytes
    return report.memory, eager_bytes(module, x), module


def _check(make: Any, dtype: torch.dtype | None, options: CompileOptions) -> None:
    memory, eager, module = _counted(make, dtype, options)
    logits = 4 * TOKENS * VOCABULARY * 4
    assert memory.residuals <= TOLERANCE * eager
    # A product is a tensor beside its sum with the bias.
    assert memory.forward <= TOLERANCE * eager + logits
    # Eager PyTorch has the gradients of the logarithms and of the logits at one time, too.
    gradients = sum(p.nbytes for p in module.parameters())
    assert 0 < memory.gradients <= gradients
    assert memory.peak <= TOLERANCE * eager + gradients + 2 * logits


def test_a_step_needs_no_more_than_eager() -> None:
    def classifier() -> tuple[nn.Module, torch.Tensor]:
        layers = nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, VOCABULARY)
        return nn.Sequential(*layers), torch.randn(4 * TOKENS, 16)

    _check(classifier, None, OPTIONS)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "autocast"])
@pytest.mark.parametrize("options", [OPTIONS, CompileOptions()], ids=["GPU", "CPU"])
@pytest.mark.parametrize("make", [bert, gpt2, llama, resnet])
def test_no_step_needs_more_than_eager(
    make: Any, options: CompileOptions, dtype: torch.dtype | None
) -> None:
    _check(make, dtype, options)


def test_inference_keeps_nothing() -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).eval()
    memory = explain(module, torch.randn(2, 4), memory=True).memory
    assert memory is not None
    assert (memory.residuals, memory.backward, memory.outputs) == (0, 0, 2 * 4 * 4)
    assert "kept for backward" not in str(memory)


def test_values_end_with_their_last_reader() -> None:
    x = relax.Var("x", relax.TensorType([4, 4], "float32"))
    builder = relax.BlockBuilder()
    with builder.function("f", [x]):
        with builder.dataflow():
            first = builder.emit(op.exp(x))  # 64 bytes, to the sum
            halves = builder.emit(op.split(first, 2))  # 32 + 32 bytes
            view = builder.emit(op.reshape(first, [16]))
            total = builder.emit(op.sum(view))  # 4 bytes
            left = builder.emit(op.exp(builder.emit(relax.TupleGetItem(halves, 0))))  # 32
            result = builder.emit_output(op.add(left, total))  # 32
        builder.emit_func_output(result)
    # At the sum: first, and both halves, because a tuple keeps the half that nothing reads.
    assert peak_bytes(builder.get()["f"]) == 64 + 2 * 32 + 4


def test_residuals_end_with_their_last_reader() -> None:
    first, second = (relax.Var(n, relax.TensorType([4, 4], "float32")) for n in ("r", "s"))
    builder = relax.BlockBuilder()
    with builder.function("f", [first, second]):
        with builder.dataflow():
            total = builder.emit(op.exp(first))  # 64 bytes
            total = builder.emit(op.add(total, second))  # 64 bytes more, and first has ended
            result = builder.emit_output(op.sum(total))
        builder.emit_func_output(result)
    function = builder.get()["f"]
    assert peak_bytes(function, [first, second]) == 3 * 64
    assert peak_bytes(function, [first]) == peak_bytes(function) == 2 * 64
