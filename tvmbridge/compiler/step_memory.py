"""The memory that a compiled step needs, counted from its functions before they are compiled.

A value takes memory from the kernel that computes it to the last kernel that reads it, in backward
if it is a residual, and a result to the end of its function. The count has no memory that a library
allocates within a kernel, and no loss by fragmentation. The functions are fused before, since
fusion decides what is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tvm import relax

from tvmbridge.compiler.build import fuse
from tvmbridge.compiler.lowering import LoweredModule
from tvmbridge.passes.base import bindings_of, flat_results, tensor_bytes, tensors_held

_VIEWS = ("relax.reshape", "relax.memory.view", "relax.memory.ensure_zero_offset")

# A result of a kernel: the variable of the call, and the number of the tensor in it.
_Value: TypeAlias = tuple[relax.Var, int]


@dataclass(frozen=True)
class StepMemory:
    """The memory of one step in bytes, beside parameters, buffers and inputs.

    - ``residuals``: what lives from forward to backward, random draws included.
    - ``outputs``: the results of forward without the residuals.
    - ``gradients``: the results of backward; 0 in inference.
    - ``forward``: the largest sum of values alive during forward, its results among them.
    - ``backward``: the same of backward, with the residuals that are still to be read; 0 in
      inference.

    Example: ``StepMemory(residuals=80, outputs=4, gradients=40, forward=90, backward=95).peak`` is
    95.
    """

    residuals: int
    outputs: int
    gradients: int
    forward: int
    backward: int

    @property
    def peak(self) -> int:
        """The largest number of bytes at any time of the step."""
        return max(self.forward, self.backward)

    def __str__(self) -> str:
        def megabytes(nbytes: int) -> str:
            return f"{nbytes / 1e6:.1f} MB"

        text = (
            f"memory of a step, at its peak: {megabytes(self.peak)}, beside parameters and inputs"
        )
        text += f" (forward {megabytes(self.forward)}, outputs {megabytes(self.outputs)}"
        if self.backward:
            text += f", kept for backward {megabytes(self.residuals)}, backward "
            text += f"{megabytes(self.backward)}, gradients {megabytes(self.gradients)}"
        return text + ")"


def step_memory(lowered: LoweredModule) -> StepMemory:
    """Count the memory of one step of ``lowered``, whose sizes must be numbers."""
    mod = fuse(lowered.mod, lowered.target, [])
    functions = {v.name_hint: f for v, f in mod.functions_items() if isinstance(f, relax.Function)}
    forward, split = functions["forward"], lowered.split
    outputs, peak = _owned(forward, lowered.num_outputs), peak_bytes(forward)
    if split is None:
        return StepMemory(residuals=0, outputs=outputs, gradients=0, forward=peak, backward=0)
    backward, draws = functions["backward"], sum(draw.spec.nbytes for draw in split.drawn)
    return StepMemory(
        residuals=split.residual_bytes,
        outputs=outputs,
        gradients=_owned(backward),
        forward=peak + draws,
        backward=peak_bytes(backward, split.bundle.residuals_of(backward)) + draws,
    )


def peak_bytes(function: relax.Function, residuals: Sequence[relax.Var] = ()) -> int:
    """Return the largest sum of bytes that values of a fused function take at one time.

    Args:
        residuals: parameters whose memory is freed after their last use.
    """
    values = _Values.of(function, residuals)
    last: dict[_Value, int] = {}
    for number, value in enumerate(values.bound.values()):
        for used in relax.analysis.free_vars(value):
            last |= dict.fromkeys(values.behind.get(used, ()), number)
    last |= dict.fromkeys(values.behind.get(function.body.body, ()), len(values.bound))
    ending: dict[int, int] = {}
    for made, number in last.items():
        ending[number] = ending.get(number, 0) + values.sizes[made]
    alive = peak = sum(values.sizes[p, 0] for p in residuals)
    for number, var in enumerate(values.bound):
        own = [made for made in values.behind[var] if made[0] == var]
        peak = max(peak, alive + sum(values.sizes[made] for made in own))
        # A value that nothing reads ends at once.
        alive += sum(values.sizes[made] for made in own if made in last)
        alive -= ending.get(number, 0)
    return peak


def _owned(function: relax.Function, count: int | None = None) -> int:
    """Return the bytes of the memory that the first ``count`` results have; None: all results."""
    values, results = _Values.of(function), flat_results(function)[:count]
    made = set().union(*(values.behind.get(result, set()) for result in results))
    return sum(values.sizes[m] for m in made)


@dataclass(frozen=True)
class _Values:
    """What the kernels of a function compute.

    - ``bound``: the value of each variable, in program order.
    - ``behind``: for each variable, the kernels' results whose memory it has; arguments have none
      that counts, but for residuals.
    - ``sizes``: the bytes of each result of a kernel.
    """

    bound: Mapping[relax.Var, relax.Expr]
    behind: Mapping[relax.Var, set[_Value]]
    sizes: Mapping[_Value, int]

    @classmethod
    def of(cls, function: relax.Function, residuals: Sequence[relax.Var] = ()) -> _Values:
        """Read ``function``, which is fused."""
        bound = bindings_of(function)
        behind: dict[relax.Var, set[_Value]] = {p: {(p, 0)} for p in residuals}
        sizes: dict[_Value, int] = {(p, 0): tensor_bytes(p) for p in residuals}
        for var, value in bound.items():
            if isinstance(value, relax.Call) and getattr(value.op, "name", "") not in _VIEWS:
                made = {(var, i): tensor_bytes(v) for i, v in enumerate(tensors_held(var))}
                sizes |= made
                behind[var] = set(made)
            else:
                behind[var] = _shared(value, behind, bound)
        return cls(bound, behind, sizes)


def _shared(
    value: relax.Expr,
    behind: Mapping[relax.Var, set[_Value]],
    bound: Mapping[relax.Var, relax.Expr],
) -> set[_Value]:
    """Return the kernel results whose memory ``value`` shares; it may be a view or a tuple."""
    if isinstance(value, relax.TupleGetItem):
        fields = bound.get(value.tuple_value)
        if isinstance(fields, relax.Tuple):
            return set(behind.get(fields.fields[value.index], ()))
        if isinstance(fields, relax.Call):
            return {(value.tuple_value, value.index)}
    used = relax.analysis.free_vars(value)
    return set().union(*(behind.get(v, set()) for v in used))
