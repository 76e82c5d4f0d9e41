"""Matrix products on NVIDIA's GPUs, from CUDA source of tvmbridge (``cuda/*.cuh``).

Half precision is multiplied by tensor cores and summed in float32. Other floats are multiplied in
their own arithmetic, by tiles in shared memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tvm import tirx
from tvm.backend.cuda.op import cuda_func_call
from tvm.ir import Expr

from tvmbridge.kernels.product_form import Form
from tvmbridge.schedules import scheduled_function
from tvmbridge.schedules.gpu.threads import allocate_in, launch
from tvmbridge.schedules.indexing import Indexer, integer
from tvmbridge.schedules.reader import Buffer

HALVES = ("float16", "bfloat16")
ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu")
_OF_LOOPS = {"float32": "float", "float64": "double"}
_LOOP_TILE, _LOOP_STEP, _LOOP_THREADS = 64, 16, 256
_MULTIPROCESSORS = 132
# Of an H100: the most shared memory of a block, and of each multiprocessor the multiplications and
# the bytes from the second-level cache in a cycle.
_MOST_SHARED, _MOST_STAGES = 227 << 10, 8
_MULTIPLIED_A_CYCLE, _READ_A_CYCLE, _CYCLES_OF_A_BLOCK = 2048, 64, 2500
_WARP = 32


@dataclass(frozen=True)
class WarpTile:
    """The part of a product that a block computes, and the part of a warp.

    - ``step``: the part of the depth that is in shared memory at a time.
    - ``stages``: the number of such parts that are copied while one is read.
    """

    rows: int
    columns: int
    warp_rows: int
    warp_columns: int
    step: int = 64
    stages: int = 3

    @property
    def threads(self) -> int:
        """The number of threads of a block."""
        return self.rows // self.warp_rows * (self.columns // self.warp_columns) * _WARP

    def shared(self, form: Form) -> int:
        """Return the bytes of shared memory that a block needs."""
        right = (self.columns, self.step) if form.right_transposed else (self.step, self.columns)
        numbers = self.rows * pitch(self.step) + right[0] * pitch(right[1])
        return 2 * numbers * self.stages


TILES = (
    WarpTile(128, 192, 64, 48),
    WarpTile(128, 144, 64, 48),
    WarpTile(128, 128, 64, 64),
    WarpTile(128, 128, 64, 32),
    WarpTile(128, 96, 64, 48),
    WarpTile(128, 64, 64, 32),
    WarpTile(64, 128, 32, 64),
    WarpTile(64, 96, 32, 48),
    WarpTile(64, 64, 32, 32),
    WarpTile(32, 64, 16, 32),
    WarpTile(16, 64, 16, 16),
)
"""The tiles to choose from, those of fewest reads of shared memory first."""


@dataclass(frozen=True)
class GroupTile:
    """The part of a product that a block of groups of four warps computes (sm_90).

    A group has 64 of the rows.
    """

    rows: int
    columns: int

    @property
    def threads(self) -> int:
        """The number of threads of a block."""
        return 2 * self.rows

    @property
    def stages(self) -> int:
        """The number of parts of the depth, of 64, in shared memory."""
        return min(_MOST_STAGES, (_MOST_SHARED - 1024) // self._bytes)

    @property
    def _bytes(self) -> int:
        return 128 * (self.rows + self.columns)

    def shared(self, form: Form) -> int:
        """Return the bytes of shared memory that a block needs, with room to align them."""
        return self.stages * self._bytes + 1024


GROUP_TILES = (
    *(GroupTile(128, columns) for columns in (256, 192, 144, 128, 96, 64, 48)),
    *(GroupTile(64, columns) for columns in (256, 192, 128, 96, 64, 32, 16)),
)
"""The tiles to choose from on GPUs that have products of groups of warps."""


def takes_groups(form: Form, dtype: str, arch: str) -> bool:
    """Whether groups of warps can compute a product, on an architecture such as ``sm_90a``."""
    operands = form.right_transposed and not form.left_transposed and form.depth % 8 == 0
    return dtype in HALVES and operands and arch == "sm_90a"


def group_tile_for(form: Form) -> GroupTile:
    """Return the tile of groups of warps with which a product is done first.

    A block takes the longer of its multiplications and its reads, and all its blocks in turns.
    """

    def time(tile: GroupTile) -> float:
        waves = -(-_blocks(form, tile.rows, tile.columns) // _MULTIPROCESSORS)
        multiplied = tile.rows * tile.columns / _MULTIPLIED_A_CYCLE
        read = 2 * (tile.rows + tile.columns) / _READ_A_CYCLE
        return waves * (max(multiplied, read) + _CYCLES_OF_A_BLOCK / form.depth)

    return min(GROUP_TILES, key=time)


def _of_groups(columns: int) -> str:
    """Return the CUDA source of a group's product with a matrix of so many columns."""
    count = columns // 2
    sums = ", ".join(f"%{i}" for i in range(count))
    operands = ", ".join(f'"+f"(sum[{i}])' for i in range(count))

    def instruction(dtype: str) -> str:
        return (
            f'asm volatile("wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{dtype}.{dtype} '
            f'{{{sums}}}, %{count}, %{count + 1}, 1, 1, 1, 0, 0;\\n" : {operands} '
            ': "l"(left), "l"(right));'
        )

    return f"""
#ifndef TENSOR_CORES_GROUP_{columns}
#define TENSOR_CORES_GROUP_{columns}
namespace tensor_cores {{
template <>
struct Group<{columns}> {{
  typedef float Sums[{count}];
  template <bool BFLOAT>
  __device__ __forceinline__ static void multiply(Sums& sum, Matrix left, Matrix right) {{
#ifdef EMULATED_TENSOR_CORES
    multiply_group<BFLOAT, {columns}>(sum, left, right);
#else
    if (BFLOAT) {{
      {instruction("bf16")}
    }} else {{
      {instruction("f16")}
    }}
#endif
  }}
}};
}}
#endif
"""


def pitch(columns: int) -> int:
    """Return the distance of rows of ``columns`` numbers of half precision in shared memory."""
    return (columns // 8 | 1) * 8


def tile_for(form: Form) -> WarpTile:
    """Return the tile with which the blocks of a product are done first.

    The time of a block is taken as its multiplications, with padding, and its reads of shared
    memory; all multiprocessors work on equal blocks.
    """

    def time(tile: WarpTile) -> float:
        waves = -(-_blocks(form, tile.rows, tile.columns) // _MULTIPROCESSORS)
        reads = 1 / tile.warp_rows + 1 / tile.warp_columns
        return waves * tile.rows * tile.columns * (1 + 16 * reads)

    return min(TILES, key=time)


@cache
def cuda_source(*names: str) -> str:
    """Return the CUDA source of the files of these names."""
    folder = Path(__file__).with_name("cuda")
    return "".join((folder / f"{name}.cuh").read_text(encoding="utf-8") for name in names)


def has_product(form: Form, dtype: str) -> bool:
    """Whether there is a kernel for a product of this form and dtype."""
    return dtype in (*HALVES, *_OF_LOOPS) and not form.left_transposed and form.work > 0


def gpu_product(
    form: Form,
    dtype: str,
    *,
    bias: bool = False,
    activation: str = "none",
    tile: WarpTile | GroupTile | None = None,
) -> tirx.PrimFunc:
    """Return the scheduled TIR function of a product.

    Its parameters are both operands, the bias if there is one, and the result.

    Args:
        bias: whether a vector is added to each row; of half precision alone.
        activation: the name, among :data:`ACTIVATIONS`, of the function of the sum; of half
            precision alone.
    """
    names = ("left", "right", *(["bias"] if bias else []), "result")
    shapes = [*form.shapes[:2], *([(form.columns,)] if bias else []), form.shapes[2]]
    buffers = [buffer_of(shape, dtype, name) for shape, name in zip(shapes, names, strict=True)]
    sizes: list[object] = [form.rows, form.columns, form.depth]
    sizes += [0 if form.left_shared else form.rows * form.depth, form.columns * form.depth]
    sizes.append(form.right_transposed)
    epilogue = [bias, ACTIVATIONS.index(activation)]
    arguments = buffers if bias else [*buffers[:2], buffers[0], buffers[2]]
    if dtype in _OF_LOOPS:
        shared = 2 * _LOOP_STEP * (_LOOP_TILE + 1) * (4 if dtype == "float32" else 8)
        function = f"tiled::product<{listed([_OF_LOOPS[dtype], *sizes])}>"
        blocks = _blocks(form, _LOOP_TILE, _LOOP_TILE)
        source = cuda_source("loops")
        return cuda_kernel(
            function, buffers, blocks=blocks, threads=_LOOP_THREADS, shared=shared, source=source
        )
    tile = tile or tile_for(form)
    if isinstance(tile, GroupTile):
        assert form.right_transposed, "a row of shared memory has one column"
        name, sizes = "product_of_groups", [*sizes[:-1], tile.rows, tile.columns, tile.stages]
        files = "tensor_cores", "products", "warp_groups"
        source = cuda_source(*files) + _of_groups(tile.columns)
    else:
        name, sizes = "product", [*sizes, tile.rows, tile.columns, tile.step]
        sizes += [tile.warp_rows, tile.warp_columns, tile.stages]
        source = cuda_source("tensor_cores", "products")
    return cuda_kernel(
        f"tensor_cores::{name}<{listed([dtype == 'bfloat16', *sizes, *epilogue])}>",
        buffers,
        blocks=_blocks(form, tile.rows, tile.columns),
        threads=tile.threads,
        shared=tile.shared(form),
        source=source,
        arguments=arguments,
    )


def _blocks(form: Form, rows: int, columns: int) -> int:
    return (form.batch or 1) * -(-form.rows // rows) * -(-form.columns // columns)


def listed(values: Sequence[object]) -> str:
    """Return values as arguments of a C++ template."""
    return ", ".join(str(v).lower() if isinstance(v, bool) else str(v) for v in values)


def buffer_of(shape: Sequence[int], dtype: str, name: str) -> Buffer:
    """Return a parameter of a kernel."""
    return tirx.decl_buffer([integer(n) for n in shape], dtype, name)


def cuda_kernel(
    name: str,
    parameters: Sequence[Buffer],
    *,
    blocks: int,
    threads: int,
    shared: int,
    source: str,
    arguments: Sequence[Buffer] = (),
    numbers: Sequence[Expr] = (),
) -> tirx.PrimFunc:
    """Return a scheduled function whose only kernel calls a function of CUDA ``source``.

    Args:
        shared: the bytes of shared memory that a block needs.
        arguments: the buffers that the function takes; empty: the parameters.
        numbers: further arguments, behind the shared memory.
    """

    def body(block: Expr, thread: Expr) -> list[tirx.Stmt]:
        room, allocation = allocate_in("shared.dyn", shared, "uint8", "room")
        pointers = [buffer.data for buffer in arguments or parameters]
        places = [tirx.Cast("int32", number) for number in (block, thread)]
        call = cuda_func_call(name, *pointers, room.data, *numbers, *places, source_code=source)
        return [allocation, tirx.Evaluate(call)]

    return scheduled_function(list(parameters), launch(Indexer(), blocks, threads, body))
