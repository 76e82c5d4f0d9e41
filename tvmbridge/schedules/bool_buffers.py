"""Intermediate bool buffers: stored as one byte per element, 0 or 1.

If vectors are written to a buffer, TVM gives it a vector dtype, and bool vectors become int8
vectors. The expressions that read them still have the type bool: TVM's simplifier fails on such an
expression, and a Select by it is ill-typed. So the int8 buffers and the conversions are written
explicitly.
"""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import tirx
from tvm.ir import Expr, TensorLoad

_BYTE = "int8"


def kept_as_bytes(body: tirx.Stmt) -> tirx.Stmt:
    """Return ``body`` with every bool buffer that it allocates replaced by an int8 buffer."""
    bytes_of: dict[Any, Any] = {}

    def allocate(node: tirx.AllocBuffer, mutator: Any) -> tirx.Stmt:
        buffer = node.buffer
        if str(buffer.dtype) != "bool":
            return mutator.default_mutate(node)
        shape, scope = list(buffer.shape), buffer.scope()
        bytes_of[buffer] = tirx.decl_buffer(shape, _BYTE, buffer.name, scope=scope)
        return tirx.AllocBuffer(bytes_of[buffer])

    def load(node: TensorLoad, mutator: Any) -> Expr:
        if node.source not in bytes_of:
            return mutator.default_mutate(node)
        indices = [mutator.mutate(index) for index in node.indices]
        return tirx.BufferLoad(bytes_of[node.source], indices) != tirx.const(0, _BYTE)

    def store(node: tirx.BufferStore, mutator: Any) -> tirx.Stmt:
        if node.buffer not in bytes_of:
            return mutator.default_mutate(node)
        indices = [mutator.mutate(index) for index in node.indices]
        value = tirx.Cast(_BYTE, mutator.mutate(node.value))
        return tirx.BufferStore(bytes_of[node.buffer], value, indices)

    return tvm_ffi.structural_mutate(
        body, [(tirx.AllocBuffer, allocate), (TensorLoad, load), (tirx.BufferStore, store)]
    )
