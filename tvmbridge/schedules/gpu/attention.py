"""Attention in half precision by tensor cores, from CUDA source (``cuda/attention.cuh``)."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx

from tvmbridge.schedules.gpu.products import buffer_of, cuda_kernel, cuda_source, listed, pitch

MOST_DEPTH = 128
_TILE, _THREADS, _ALIGNMENT = 64, 128, 8
_MASKS = {"bool": 1, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class StridedOperand:
    """A tensor as the kernel reads it.

    - ``shape``: the shape in memory.
    - ``offset``: the number of the first element.
    - ``strides``: the distances of neighbours along batch, head, row and depth, in elements.
    """

    shape: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]

    @property
    def is_aligned(self) -> bool:
        """Whether each row begins at a multiple of 16 bytes and is contiguous."""
        starts = (self.offset, *self.strides[:-1])
        return self.strides[-1] == 1 and all(s % _ALIGNMENT == 0 for s in starts)


@dataclass(frozen=True)
class AttentionForm:
    """The sizes and operands of an attention.

    - ``batch``, ``heads``, ``rows``, ``columns``, ``depth``: query is (batch, heads, rows, depth).
    - ``key_heads``: the number of heads of key and value, which divides ``heads``.
    - ``mask``, ``mask_dtype``: a mask of zeros in the strides where it broadcasts, and its dtype.
    """

    batch: int
    heads: int
    key_heads: int
    rows: int
    columns: int
    depth: int
    query: StridedOperand
    key: StridedOperand
    value: StridedOperand
    mask: StridedOperand | None
    mask_dtype: str
    causal: bool
    scale: float


def has_attention(form: AttentionForm) -> bool:
    """Whether the kernel can compute the form."""
    operands = (form.query, form.key, form.value)
    sizes = (form.batch, form.heads, form.rows, form.columns, form.depth)
    return (
        min(sizes) > 0
        and form.depth <= MOST_DEPTH
        and form.depth % _ALIGNMENT == 0
        and all(operand.is_aligned for operand in operands)
    )


def gpu_attention(form: AttentionForm, dtype: str) -> tirx.PrimFunc:
    """Return the scheduled TIR function of query, key, value, the mask if any, and the result.

    The result is (batch, rows, heads, depth).
    """
    operands = [form.query, form.key, form.value]
    parameters = [
        buffer_of(operand.shape, dtype, name)
        for operand, name in zip(operands, ("query", "key", "value"), strict=True)
    ]
    mask, strides = parameters[0], (0, 0, 0, 0)
    if form.mask is not None:
        mask = buffer_of(form.mask.shape, form.mask_dtype, "mask")
        parameters.append(mask)
        strides = form.mask.strides  # type: ignore[assignment]
    result = buffer_of((form.batch, form.rows, form.heads, form.depth), dtype, "result")
    kinds = [f"tensor_cores::Operand<{listed([o.offset, *o.strides[:3]])}>" for o in operands]
    sizes = [form.heads, form.heads // form.key_heads, form.rows, form.columns, form.depth]
    kind = 0 if form.mask is None else _MASKS[form.mask_dtype]
    values = [dtype == "bfloat16", *sizes, *kinds, kind, *strides, form.causal]
    shared = 2 * 5 * _TILE * pitch(-(-form.depth // 16) * 16)
    return cuda_kernel(
        f"tensor_cores::attention<{listed(values)}>",
        [*parameters, result],
        blocks=form.batch * form.heads * -(-form.rows // _TILE),
        threads=_THREADS,
        shared=shared,
        source=cuda_source("tensor_cores", "attention"),
        arguments=[*parameters[:3], mask, result],
        numbers=[tirx.const(form.scale, "float32")],
    )
