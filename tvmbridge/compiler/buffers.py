"""The buffers of compiled functions, and the memory in which TVM's planner places several of them.

::

    storage = R.memory.alloc_storage(R.shape([32768]), ...)
    a = R.memory.alloc_tensor(storage, 0, R.shape([32, 256]), "float32")   # lives until b is made
    b = R.builtin.alloc_tensor(R.shape([32, 64]), "float32")               # a result: not planned
    kernel(a, b)
    c = R.memory.alloc_tensor(storage, 0, R.shape([32, 64]), "float32")    # where a was
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import tvm
from tvm import relax

from tvmbridge.passes.base import PassReport, RelaxPass, dtype_of, shape_of

_STORAGE = "relax.memory.alloc_storage"
_PLANNED = "relax.memory.alloc_tensor"
_UNPLANNED = "relax.builtin.alloc_tensor"
_KILLS = ("relax.memory.kill_tensor", "relax.memory.kill_storage")
_VIEWS = ("relax.reshape", "relax.memory.view")


@dataclass(frozen=True)
class Buffer:
    """A tensor that a function allocates.

    - ``storage``: the number of the storage that it is placed in; None if it has its own memory, as
      results have.
    - ``first``, ``last``: the numbers of the first and last step that use it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    storage: int | None
    first: int
    last: int

    @property
    def nbytes(self) -> int:
        """The size of the buffer in bytes."""
        return math.prod(self.shape) * ((tvm.DataType(self.dtype).bits + 7) // 8)


@dataclass(frozen=True)
class BufferPlan:
    """The memory plan of a function.

    - ``steps``: the name of the kernel or function that each step calls.
    - ``buffers``: the tensors that the function allocates.
    - ``storages``: the size of each storage in bytes.
    """

    steps: tuple[str, ...]
    buffers: tuple[Buffer, ...]
    storages: tuple[int, ...]

    @property
    def reuse(self) -> Reuse:
        """How much memory the planned buffers share."""
        planned = sum(b.nbytes for b in self.buffers if b.storage is not None)
        return Reuse(sum(self.storages), planned)


@dataclass(frozen=True)
class Reuse:
    """Memory of a function's intermediate values, in bytes.

    Results, residuals and memory that PyTorch's kernels allocate are not counted.

    - ``shared``: the size of the storages that the values share.
    - ``separate``: the size that the values would need without sharing.
    """

    shared: int
    separate: int

    def __str__(self) -> str:
        return f"{self.shared / 1e6:.1f} MB, without reuse {self.separate / 1e6:.1f} MB"


@dataclass(frozen=True)
class NotePlans(RelaxPass):
    """Record the memory plan of each function in ``plans``; the module is not changed.

    Functions with symbolic sizes have no plan. Runs after: the planner. Runs before:
    LowerAllocTensor.
    """

    plans: dict[str, BufferPlan] = field(default_factory=dict)

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        for name, function in mod.functions_items():
            if isinstance(function, relax.Function):
                plan = buffer_plan(function)
                if plan is not None:
                    self.plans[name.name_hint] = plan
        return mod


def buffer_plan(function: relax.Function) -> BufferPlan | None:
    """Return the plan of a function in destination-passing style; None if a size is a symbol."""
    reading = _Reading()
    for block in function.body.blocks:
        for binding in block.bindings:
            if not reading.read(binding):
                return None
    reading.use([function.body.body], len(reading.steps))
    return BufferPlan(tuple(reading.steps), tuple(reading.buffers), tuple(reading.storages))


class _Reading:
    def __init__(self) -> None:
        self.steps: list[str] = []
        self.buffers: list[Buffer] = []
        self.storages: list[int] = []
        self.numbers: dict[relax.Var, int] = {}  # of the storages
        self.behind: dict[relax.Var, set[int]] = {}  # the buffers that a variable may be in

    def read(self, binding: relax.Binding) -> bool:
        """Process one binding; return False if a size is not a number."""
        var, value = binding.var, binding.value
        name = _operator(value)
        if name == _STORAGE:
            (size,) = value.args[0].values
            if not isinstance(size, tvm.tirx.IntImm):
                return False
            self.numbers[var] = len(self.storages)
            self.storages.append(int(size))
        elif name in (_PLANNED, _UNPLANNED):
            shape = shape_of(var)
            if shape is None:
                return False
            planned = name == _PLANNED
            number = self.numbers[value.args[0]] if planned else None
            here = len(self.steps)
            self.behind[var] = {len(self.buffers)}
            self.buffers.append(Buffer(var.name, shape, dtype_of(var), number, here, here))
        elif not isinstance(value, relax.Call) or name in _VIEWS:
            used = relax.analysis.free_vars(value)
            self.behind[var] = set().union(*(self.behind.get(v, set()) for v in used))
        elif name not in _KILLS:
            self.use(value.args, len(self.steps))
            self.steps.append(_title(value))
        return True

    def use(self, values: Sequence[relax.Expr], step: int) -> None:
        """Record that ``step`` uses the buffers of ``values``."""
        for value in values:
            for var in relax.analysis.free_vars(value):
                for number in self.behind.get(var, ()):
                    self.buffers[number] = replace(self.buffers[number], last=step)


def _operator(value: relax.Expr) -> str:
    return getattr(value.op, "name", "") if isinstance(value, relax.Call) else ""


def _title(call: relax.Call) -> str:
    if isinstance(call.op, tvm.ir.GlobalVar):
        return str(call.op.name_hint)
    if isinstance(call.op, relax.ExternFunc):
        return str(call.op.global_symbol)
    return _operator(call).removeprefix("relax.")
