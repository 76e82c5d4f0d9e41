"""ReturnPadded: products with unaligned rows are returned padded, and cut by strides."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from tvmbridge.backends import backend_of
from tvmbridge.compiler import compiled as compiling
from tvmbridge.compiler.compiled import CompiledModule, compile_module
from tvmbridge.compiler.request import CompileRequest
from tvmbridge.core.options import CompileOptions
from tvmbridge.recall.codec import decode, encode

_DEPTH, _COLUMNS, _PITCH = 512, 51, 56


class _Head(nn.Module):
    """A normed linear layer; ``more`` returns its maximum as well, which reads the product."""

    def __init__(self, *, bias: bool, more: bool = False) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(_DEPTH), nn.Linear(_DEPTH, _COLUMNS, bias=bias)
        self.more = more

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = self.head(self.norm(x))
        return (x * 2, logits, logits.amax(-1)) if self.more else (x * 2, logits)


def _compiled(
    module: nn.Module, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> tuple[CompiledModule, list[torch.Tensor]]:
    """Compile ``module`` as for a device with CUDA graphs; return it and the primals."""
    backend = replace(backend_of(x.device), replays=True)
    monkeypatch.setattr(compiling, "backend_of", lambda device: backend)
    request = CompileRequest(module, (x,), {}, needs_grad=False, options=CompileOptions())
    compiled = compile_module(request)
    held = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    primals = [x if i.target is None else held[i.target] for i in compiled.captured.inputs]
    return compiled, primals


@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_logits_are_cut_by_strides(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    module, x = _Head(bias=bias).bfloat16().eval(), torch.randn(4, 160, _DEPTH).bfloat16()
    compiled, primals = _compiled(module, x, monkeypatch)
    dense, view = compiled.forward(primals)[1], compiled.forward(primals, copied=True)[1]
    assert dense.is_contiguous()
    assert view.stride() == (160 * _PITCH, _PITCH, 1)
    assert view.clone().stride() == dense.stride()
    exact = copy.deepcopy(module).double()(x.double())[1]
    expected = (module(x)[1] - exact).norm()
    for found in (dense, view):
        assert found.shape == exact.shape
        assert (found - exact).norm() <= 1.1 * expected
    assert torch.equal(compiled.forward(primals)[0], x * 2)


@pytest.mark.parametrize(
    ("module", "dtype"),
    [(_Head(bias=True, more=True), torch.bfloat16), (_Head(bias=False), torch.float32)],
    ids=["read elsewhere", "float32"],
)
@torch.no_grad()
def test_others_are_returned_as_they_are(
    module: nn.Module, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(640, _DEPTH, dtype=dtype)
    compiled, primals = _compiled(module.to(dtype).eval(), x, monkeypatch)
    assert not compiled.layouts.padded
    found = compiled.forward(primals, copied=True)[1]
    torch.testing.assert_close(found, module(x)[1], rtol=2e-2, atol=2e-2)
    assert found.is_contiguous()


@torch.no_grad()
def test_a_plan_keeps_the_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(640, _DEPTH).bfloat16()
    compiled, _ = _compiled(_Head(bias=False).bfloat16().eval(), x, monkeypatch)
    layouts = decode(encode(compiled.layouts))
    assert layouts == compiled.layouts
    assert layouts.padded[1].stride == (_PITCH, 1)
