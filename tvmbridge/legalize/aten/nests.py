"""Functions to write loop nests that tensor expressions cannot describe: scans, scatters, sorts.

Such loop nests are written statement by statement. FuseOps does not fuse them with other operators,
and no schedule rule changes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from math import prod
from typing import Any, TypeAlias

from tvm import relax, tirx
from tvm.ir import Expr
from tvm.s_tir import SBlock, SBlockRealize
from tvm.script.ir_builder import IRBuilder
from tvm.target import Target
from tvm.tirx.script import builder as tir

from tvmbridge.legalize.broadcast import OPAQUE, shape_of
from tvmbridge.schedules.machine import Machine

Buffer: TypeAlias = Any
Write = Callable[[Sequence[Buffer], Sequence[Buffer]], None]
Nest = tuple[Sequence[int], str]


def index(value: int) -> Expr:
    """Return a constant for an index, of dtype int64."""
    return tirx.IntImm("int64", value)


def emit_nest(
    bb: relax.BlockBuilder,
    name: str,
    tensors: Sequence[Expr],
    results: Sequence[Nest],
    write: Write,
) -> Expr:
    """Emit a TIR function with the statements that ``write(inputs, outputs)`` writes, and its call.

    Args:
        write: called within TVM's IR builder, with the buffers of tensors and results.

    Returns:
        The variable of the result, or of a tuple if there are several results.
    """
    with IRBuilder() as builder, tir.prim_func(s_tir=True):
        tir.func_name(name)
        tir.func_attr({"tirx.noalias": True, "op_pattern": OPAQUE, "tirx.is_scheduled": True})
        inputs = [_parameter(f"x{i}", shape_of(t), dtype_of(t)) for i, t in enumerate(tensors)]
        outputs = [_parameter(f"y{i}", shape, dtype) for i, (shape, dtype) in enumerate(results)]
        write(inputs, outputs)
    # Passes over Relax modules expect functions with a root block.
    function = builder.get()
    root = SBlock([], [], [], "root", function.body)
    function = function.with_body(SBlockRealize([], True, root))
    types = [relax.TensorType(list(shape), dtype) for shape, dtype in results]
    callee = bb.add_func(function.without_attr("global_symbol"), name)
    type_ = types[0] if len(types) == 1 else types
    return bb.emit(relax.call_tir(callee, list(tensors), out_ty=type_))


def _parameter(name: str, shape: Sequence[int], dtype: str) -> Buffer:
    # Extents are int64 like the indices of loops: TVM does not simplify mixed dtypes.
    return tir.arg(name, tir.buffer([index(n) for n in shape], dtype, layout=None))


def dtype_of(tensor: Expr) -> str:
    """Return the dtype of a Relax tensor, by name."""
    return str(tensor.ty.dtype.dtype)


@contextmanager
def loops(*extents: int | Expr, parallel_work: int = 0) -> Iterator[list[Expr]]:
    """Open nested loops around the statements in the context, and return their indices.

    Args:
        parallel_work: the number of element operations within. If it is given and large enough,
            the outermost loop runs on several cores.
    """
    with ExitStack() as stack:
        indices = []
        for depth, extent in enumerate(extents):
            if isinstance(extent, int):
                divided = not depth and _pays(parallel_work, extent)
                frame = (tir.parallel if divided else tir.serial)(index(0), index(extent))
            else:
                frame = tir.serial(index(0), extent)
            indices.append(stack.enter_context(frame))
        yield indices


def _pays(work: int, steps: int) -> bool:
    target = Target.current(allow_none=True)
    return bool(work) and target is not None and Machine.of(target).chunks(8 * work, steps) > 1


@contextmanager
def when(condition: Expr) -> Iterator[None]:
    """Run the statements in the context only if ``condition`` holds."""
    with tir.If(condition), tir.Then():
        yield


def local(count: int, dtype: str) -> Buffer:
    """Allocate a buffer of ``count`` elements for each iteration of the loop around it."""
    return tir.alloc_buffer([index(count)], dtype, layout=None)


def store(buffer: Buffer, value: Expr, *indices: Expr) -> None:
    """Emit ``buffer[indices] = value``; without indices, write element 0."""
    tir.buffer_store(buffer, value, list(indices) or [index(0)])


def around(shape: Sequence[int], axis: int) -> tuple[int, int, int]:
    """Return the number of elements before ``axis``, along it, and after it."""
    return prod(shape[:axis]), shape[axis], prod(shape[axis + 1 :])
