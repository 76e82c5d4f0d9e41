"""Attention of ``cuda/attention.cuh``, run on the host."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import tvm

from tests.schedules.gpu.emulator import EmulatedFunction, compile_for_host, gpu_target, source_of
from tvmbridge.backends import BACKENDS
from tvmbridge.schedules.gpu.attention import (
    AttentionForm,
    StridedOperand,
    gpu_attention,
    has_attention,
)


@dataclass(frozen=True)
class _Case:
    batch: int = 1
    heads: int = 2
    key_heads: int = 2
    rows: int = 64
    columns: int = 64
    depth: int = 16
    dtype: torch.dtype = torch.float16
    mask: torch.Tensor | None = None
    causal: bool = False
    joined: bool = False  # query, key and value are parts of one tensor


def _mask(rows: int, columns: int) -> torch.Tensor:
    mask = torch.rand(1, 1, rows, columns, generator=torch.Generator().manual_seed(1)) > 0.4
    mask[..., 1, :] = False
    return mask


_CASES = [
    _Case(),
    _Case(batch=2, rows=70, columns=130, depth=24, dtype=torch.bfloat16),
    _Case(rows=130, columns=130, causal=True, joined=True),
    _Case(heads=4, key_heads=2, rows=5, columns=70, depth=8, causal=True),
    _Case(rows=40, columns=90, mask=_mask(40, 90)),
    _Case(rows=40, columns=65, mask=torch.randn(2, 1, 65).half(), batch=1),
    _Case(heads=1, key_heads=1, rows=17, columns=33, depth=128),
]


def _operands(case: _Case) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    if case.joined:
        shape = (case.batch, case.rows, 3, case.heads, case.depth)
        joined = torch.randn(shape, generator=generator).to(case.dtype)
        return [joined[:, :, i].transpose(1, 2) for i in range(3)]
    sizes = (
        (case.heads, case.rows),
        (case.key_heads, case.columns),
        (case.key_heads, case.columns),
    )
    return [
        torch.randn(case.batch, *size, case.depth, generator=generator).to(case.dtype)
        for size in sizes
    ]


def _strided(tensor: torch.Tensor, joined: bool) -> StridedOperand:
    base = tensor._base if joined else tensor
    assert base is not None
    return StridedOperand(tuple(base.shape), tensor.storage_offset(), tensor.stride())


def _form(case: _Case, operands: list[torch.Tensor]) -> AttentionForm:
    query, key, value = (_strided(t, case.joined) for t in operands)
    mask = None
    if case.mask is not None:
        shape = (case.batch, case.heads, case.rows, case.columns)
        strides = case.mask.expand(shape).stride()
        mask = StridedOperand(tuple(case.mask.shape), 0, strides)
    dtype = "" if case.mask is None else str(case.mask.dtype).removeprefix("torch.")
    return AttentionForm(
        case.batch,
        case.heads,
        case.key_heads,
        case.rows,
        case.columns,
        case.depth,
        query,
        key,
        value,
        mask,
        dtype,
        case.causal,
        1 / math.sqrt(case.depth),
    )


def _expected(case: _Case, operands: list[torch.Tensor]) -> torch.Tensor:
    query, key, value = (t.double() for t in operands)
    shared = case.heads // case.key_heads
    key, value = (t.repeat_interleave(shared, 1) for t in (key, value))
    scores = query @ key.mT / math.sqrt(case.depth)
    if case.causal:
        allowed = torch.ones(case.rows, case.columns).tril().bool()
        scores = scores.masked_fill(~allowed, -math.inf)
    if case.mask is not None:
        boolean = case.mask.dtype is torch.bool
        scores = scores.masked_fill(~case.mask, -math.inf) if boolean else scores + case.mask
    return torch.nan_to_num(scores.softmax(-1)) @ value


def test_attention_of_all_forms() -> None:
    BACKENDS["cuda"].prepare()
    functions, given = {}, {}
    for number, case in enumerate(_CASES):
        operands = _operands(case)
        form = _form(case, operands)
        assert has_attention(form)
        name = f"case_{number}"
        dtype = str(case.dtype).removeprefix("torch.")
        functions[name] = gpu_attention(form, dtype).with_attr("global_symbol", name)
        given[name] = operands
    source, lowered = source_of(tvm.IRModule(functions), gpu_target())
    library = compile_for_host(source)
    for (name, operands), case in zip(given.items(), _CASES, strict=True):
        tensors = [operands[0]._base] * 3 if case.joined else operands
        masks = [] if case.mask is None else [case.mask]
        result = torch.empty(case.batch, case.rows, case.heads, case.depth, dtype=case.dtype)
        EmulatedFunction(library, lowered[name], 1)(*tensors, *masks, result)
        expected = _expected(case, operands)
        error = (result.transpose(1, 2).double() - expected).abs().max()
        assert error <= 4 * torch.finfo(case.dtype).eps, (name, float(error))


def test_rows_that_are_not_aligned_are_declined() -> None:
    case = _Case(depth=12)
    assert not has_attention(_form(case, _operands(case)))
