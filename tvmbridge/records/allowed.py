"""An allow-list of the scheduling steps that a tuning record may have.

TVM's scheduler executes whatever a trace says. A trace could link code of its own
(``pragma_import_llvm``), or change what a function computes. So a trace is applied only if the
rules of :mod:`tvmbridge.tuning.search` can produce each of its steps, with values of the same kind
and range. The scheduled function must not grow beyond ``GROWTH``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.s_tir import SBlock, Schedule

Check = Callable[[Any], bool]


class RefusedRecordError(ValueError):
    """A record has content that is not on the allow-list; the message names it."""


def _number(low: int, high: int) -> Check:
    return lambda value: type(value) is int and low <= value <= high


def _word(pattern: str) -> Check:
    return lambda value: isinstance(value, str) and re.fullmatch(pattern, value) is not None


def _list(check: Check, longest: int) -> Check:
    return lambda value: (
        isinstance(value, list) and len(value) <= longest and all(map(check, value))
    )


def _flag(value: Any) -> bool:
    return value is True or value is False or (type(value) is int and value in (0, 1))


def _share(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= 1


MOST_STEPS = 4000
MOST_OPERANDS = 64
LARGEST_FACTOR = 2**31 - 1
WIDEST_VECTOR = 256
GROWTH = 64  # limit of iterations and buffer elements, as a multiple of the unscheduled function's
_SMALL = 2**16

NAME: Check = _word(r"[\w.\[\]-]{1,300}")
VARIABLE: Check = _word(r"[blv]\d{1,6}")
_UNROLL = _number(0, 1024)


@dataclass(frozen=True)
class InstructionKind:
    """The operands that one kind of scheduling instruction may have.

    - ``inputs``: a regular expression over one letter for each input. ``b``, ``l`` and ``v`` are a
      block, a loop and a value that earlier steps named; ``i`` is a number, ``n`` None, ``e`` an
      empty list, ``q`` a quoted word.
    - ``outputs``: the same for the outputs: ``b``, ``l`` and ``v``.
    - ``attributes``: one check for each attribute.
    - ``decision``: the check of the decision; None if the instruction takes no decision.
    """

    inputs: str
    outputs: str = ""
    attributes: tuple[Check, ...] = ()
    decision: Check | None = None


_INDEX = _number(-2, 1000)


def _is_key(value: Any) -> bool:
    return isinstance(value, str) and value in ANNOTATIONS


_AT = InstructionKind("bl", "", (_flag, _INDEX))

STEPS: Mapping[str, InstructionKind] = {
    "GetSBlock": InstructionKind("", "b", (NAME, lambda value: value == "main")),
    "GetLoops": InstructionKind("b", "l*"),
    "GetChildBlocks": InstructionKind("b", "b*"),
    "GetProducers": InstructionKind("b", "b*"),
    "GetConsumers": InstructionKind("b", "b*"),
    "SampleCategorical": InstructionKind(
        "", "v", (_list(_UNROLL, 16), _list(_share, 16)), decision=_number(0, 15)
    ),
    "SamplePerfectTile": InstructionKind(
        "l",
        "v+",
        (_number(1, 16), _number(1, 1024)),
        decision=_list(_number(1, LARGEST_FACTOR), 16),
    ),
    "SampleComputeLocation": InstructionKind("b", "l", decision=_INDEX),
    "ComputeInline": InstructionKind("b"),
    "ReverseComputeInline": InstructionKind("b"),
    "ComputeAt": _AT,
    "ReverseComputeAt": _AT,
    "CacheWrite": InstructionKind("be", "b", (_number(0, 64), lambda value: value == "global")),
    "Fuse": InstructionKind("l+", "l", (_flag,)),
    "Split": InstructionKind("l[vin]+", "l+", (_flag, _flag)),
    "Reorder": InstructionKind("l+"),
    "Parallel": InstructionKind("l"),
    "Vectorize": InstructionKind("l"),
    "RFactor": InstructionKind("l", "b", (_number(0, 64),)),
    "DecomposeReduction": InstructionKind("bl", "b"),
    "Annotate": InstructionKind("[bl][viq]", "", (_is_key,)),
    "Unannotate": InstructionKind("[bl]", "", (_is_key,)),
    "EnterPostproc": InstructionKind(""),
}

# Checks for constant values of annotations. A value that an earlier step sampled was checked there.
ANNOTATIONS: Mapping[str, Check] = {
    "meta_schedule.parallel": _number(-1, 2**20),
    "meta_schedule.vectorize": _number(0, WIDEST_VECTOR),
    "meta_schedule.unroll_explicit": _UNROLL,
    "meta_schedule.tiling_structure": _word(r'"[SR]{1,16}"'),
    "meta_schedule.random_compute_producer": _flag,
    "pragma_auto_unroll_max_step": _UNROLL,
    "pragma_unroll_explicit": _flag,
}


def trace_refusal(trace: Any) -> str | None:
    """Return why a trace in JSON form may not be applied; None if it may."""
    if not (isinstance(trace, list) and len(trace) == 2 and _list(_is_step, MOST_STEPS)(trace[0])):
        return f"it is no trace of at most {MOST_STEPS} steps"
    if not _list(_is_decision, MOST_STEPS)(trace[1]):
        return "its decisions are no pairs of a step and a decision"
    known: set[str] = set()
    for number, (name, inputs, attributes, outputs) in enumerate(trace[0]):
        reason = _step_refusal(name, inputs, attributes, outputs, known)
        if reason is not None:
            return f"step {number}, {name!r:.60}: {reason}"
        known.update(outputs)
    for number, decision in trace[1]:
        step = STEPS[trace[0][number][0]] if 0 <= number < len(trace[0]) else None
        if step is None or step.decision is None or not step.decision(decision):
            return f"decision {decision!r:.60} of step {number} is not allowed"
    return None


def _is_step(value: Any) -> bool:
    lists = isinstance(value, list) and len(value) == 4 and isinstance(value[0], str)
    return lists and all(isinstance(v, list) and len(v) <= MOST_OPERANDS for v in value[1:])


def _is_decision(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and type(value[0]) is int


def _step_refusal(
    name: str, inputs: list[Any], attributes: list[Any], outputs: list[Any], known: set[str]
) -> str | None:
    step = STEPS.get(name)
    if step is None:
        return "the instruction is not allowed"
    kinds = "".join(_kind(value, known) for value in inputs)
    if not re.fullmatch(step.inputs, kinds):
        return f"it does not take the inputs {inputs!s:.80}"
    if not all(map(VARIABLE, outputs)) or len(set(outputs)) < len(outputs):
        return "its outputs are not named as variables"
    if not re.fullmatch(step.outputs, "".join(value[0] for value in outputs)):
        return f"it does not give the outputs {outputs!s:.80}"
    checks = step.attributes
    if len(attributes) != len(checks) or not all(
        check(value) for check, value in zip(checks, attributes, strict=True)
    ):
        return f"the attributes {attributes!s:.80} are not allowed"
    if name == "Annotate" and kinds[1] != "v" and not ANNOTATIONS[attributes[0]](inputs[1]):
        return f"the value {inputs[1]!r:.80} of {attributes[0]} is not allowed"
    return None


def _kind(value: Any, known: set[str]) -> str:
    """Return the letter that stands for an input in patterns; ``?`` if no input may be like it."""
    if isinstance(value, str) and value in known:
        return value[0]
    if type(value) is int and abs(value) <= LARGEST_FACTOR:
        return "i"
    if isinstance(value, str) and re.fullmatch(r'"\w{1,16}"', value):
        return "q"
    return "n" if value == "None" else "e" if value == [] else "?"


def scheduled_by(mod: tvm.IRModule, trace: Any) -> Schedule:
    """Apply a trace in JSON form to the function ``main`` of ``mod``, and return the schedule.

    Raises:
        RefusedRecordError: a step is not on the allow-list, or the function grows too large.
        Exception: the steps do not fit the function; TVM raises no narrower class.
    """
    reason = trace_refusal(trace)
    if reason is None:
        schedule = Schedule(mod)
        before = _extents(schedule)
        tvm.s_tir.Trace.apply_json_to_schedule(trace, schedule)
        reason = _growth(before, _extents(schedule))
    if reason is not None:
        raise RefusedRecordError(reason)
    return schedule


@dataclass(frozen=True)
class _Extents:
    iterations: int
    elements: int
    lanes: int


def _extents(schedule: Schedule) -> _Extents:
    """Return the largest numbers of block iterations, buffer elements and vector lanes."""
    function = schedule.mod["main"]
    blocks: list[SBlock] = []
    tvm_ffi.structural_walk(function.body, (SBlock, blocks.append))
    iterations = lanes = 1
    for block in blocks[1:]:  # the first one is the root
        loops = [schedule.get(loop) for loop in _loops(schedule, block.name_hint)]
        iterations = max(iterations, prod(_size(loop.extent) for loop in loops))
        vectorised = (loop for loop in loops if loop.kind == tirx.ForKind.VECTORIZED)
        lanes = max(lanes, prod(_size(loop.extent) for loop in vectorised))
    buffers = [*function.params, *(b for block in blocks for b in block.alloc_buffers)]
    shapes = (getattr(buffer, "shape", ()) for buffer in buffers)
    elements = max((prod(_size(d) for d in shape) for shape in shapes), default=1)
    return _Extents(iterations, elements, lanes)


def _loops(schedule: Schedule, block: str) -> list[Any]:
    return list(schedule.get_loops(schedule.get_sblock(block, func_name="main")))


def _size(extent: Any) -> int:
    return int(extent) if isinstance(extent, tirx.IntImm) else LARGEST_FACTOR


def _growth(before: _Extents, after: _Extents) -> str | None:
    if after.lanes > WIDEST_VECTOR:
        return f"vectors of {after.lanes} elements"
    for what in ("iterations", "elements"):
        most = GROWTH * max(getattr(before, what), _SMALL)
        if getattr(after, what) > most:
            return f"{getattr(after, what)} {what}, where {most} are the most"
    return None
