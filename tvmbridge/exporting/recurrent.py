"""Compute recurrent layers (LSTM, GRU, tanh and ReLU RNN) in loops over their time steps.

The products with the inputs of all steps are one matrix product. A generated loop nest computes the
rest: each row of the batch runs through all steps on one core.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tvm import relax, tirx
from tvm.ir import Call, Expr

from tvmbridge.legalize.aten.arguments import Arguments
from tvmbridge.legalize.aten.nests import Buffer, dtype_of, emit_nest, index, local, loops, store
from tvmbridge.legalize.broadcast import shape_of
from tvmbridge.legalize.functions import FUNCTIONS, HALF
from tvmbridge.legalize.lets import constant

_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
# A step adds so many products to an element of the gates at once.
_AT_ONCE = 4
# A cell writes its new state for one unit: (given gates, hidden gates, state, cell state, unit).
# It may write into the hidden gates of this unit, to use a value twice.
_Cell = Callable[["_Gates", "_Gates", Buffer, Buffer, Expr], None]


@dataclass(frozen=True)
class _Gates:
    """The gates of one unit: elements of a buffer that are ``units`` apart.

    - ``buffer``: a buffer whose last dimension has the gates of all units.
    - ``front``: the indices before the last dimension.
    """

    buffer: Buffer
    front: tuple[Expr, ...]
    units: int
    unit: Expr

    def __call__(self, gate: int) -> Expr:
        """Return the value of a gate."""
        return self.buffer[(*self.front, index(gate * self.units) + self.unit)]

    def set(self, gate: int, value: Expr) -> None:
        """Write the value of a gate."""
        store(self.buffer, value, *self.front, index(gate * self.units) + self.unit)


@dataclass(frozen=True)
class _Layer:
    """One layer in one direction.

    - ``kind``: a key of ``_GATES``.
    - ``number``: its number among the states.
    - ``reverse``: whether it starts at the last step.
    - ``w_ih``, ``w_hh``, ``b_ih``, ``b_hh``, ``w_hr``: its weights; the last three may be None.
    """

    kind: str
    number: int
    reverse: bool
    w_ih: Expr
    w_hh: Expr
    b_ih: Expr | None
    b_hh: Expr | None
    w_hr: Expr | None

    @property
    def units(self) -> int:
        """Return the number of units, which is the width of the cell state."""
        return int(shape_of(self.w_hh)[0]) // _GATES[self.kind]

    @property
    def width(self) -> int:
        """Return the width of the hidden state."""
        return int(shape_of(self.w_hh)[1])


def recurrent(bb: relax.BlockBuilder, call: Call, arguments: Arguments) -> Expr | None:
    """Return the results of a stack of recurrent layers; None under autocast.

    Layers of half precision are computed in float32, and their results are rounded once.
    """
    kind = arguments.op.removeprefix("tvmbridge.").removesuffix("_stack.default")
    if arguments["autocast"] is not None:
        return None
    dtype = dtype_of(arguments["input"])
    if dtype in HALF:
        arguments = _widened(bb, arguments)
    x, states = arguments["input"], list(arguments["states"])
    if arguments["batch_first"]:
        x = bb.emit(relax.op.permute_dims(x, [1, 0, 2]))
    finals: list[list[Expr]] = [[] for _ in states]
    directions = 2 if arguments["bidirectional"] else 1
    layers = _layers(kind, arguments, directions)
    for first in range(0, len(layers), directions):
        outputs = []
        for layer in layers[first : first + directions]:
            output, *final = _run(bb, x, states, layer)
            outputs.append(output)
            for found, value in zip(finals, final, strict=True):
                found.append(value)
        x = outputs[0] if directions == 1 else bb.emit(relax.op.concat(outputs, 2))
    results = [x, *(f[0] if len(f) == 1 else bb.emit(relax.op.concat(f, 0)) for f in finals)]
    if dtype in HALF:
        results = [bb.emit(relax.op.astype(result, dtype)) for result in results]
    return relax.Tuple([results[n] for n in arguments.results or range(len(results))])


def _widened(bb: relax.BlockBuilder, arguments: Arguments) -> Arguments:
    """Return the arguments with input, states and weights in float32."""

    def wide(value: Any) -> Any:
        if isinstance(value, list):
            return [wide(each) for each in value]
        return bb.emit(relax.op.astype(value, "float32")) if isinstance(value, Expr) else value

    names = ("input", "states", "weights")
    values = {
        name: wide(value) if name in names else value for name, value in arguments.values.items()
    }
    return replace(arguments, values=values)


def _layers(kind: str, arguments: Arguments, directions: int) -> list[_Layer]:
    weights, count = list(arguments["weights"]), int(arguments["num_layers"]) * directions
    each = len(weights) // count
    has_biases = bool(arguments["has_biases"])
    found = []
    for number in range(count):
        w_ih, w_hh, *others = weights[number * each : (number + 1) * each]
        b_ih, b_hh = others[:2] if has_biases else (None, None)
        w_hr = others[-1] if len(others) > (2 if has_biases else 0) else None
        reverse = bool(number % directions)
        found.append(_Layer(kind, number, reverse, w_ih, w_hh, b_ih, b_hh, w_hr))
    return found


def _transposed(bb: relax.BlockBuilder, matrix: Expr) -> Expr:
    return bb.emit(relax.op.permute_dims(matrix, [1, 0]))


def _run(
    bb: relax.BlockBuilder, x: Expr, states: Sequence[Expr], layer: _Layer
) -> tuple[Expr, ...]:
    """Return the output of a layer for all steps, and its final states, each of one layer."""
    (steps, batch, width), dtype = shape_of(x), dtype_of(x)
    gates = int(shape_of(layer.w_hh)[0])
    flat = bb.emit(relax.op.reshape(x, (steps * batch, width)))
    given = bb.emit(relax.op.matmul(flat, _transposed(bb, layer.w_ih)))
    if layer.b_ih is not None:
        given = bb.emit(relax.op.add(given, layer.b_ih))
    given = bb.emit(relax.op.reshape(given, (steps, batch, gates)))
    tensors = [given, _transposed(bb, layer.w_hh), *states]
    optional = [layer.b_hh, None if layer.w_hr is None else _transposed(bb, layer.w_hr)]
    tensors += [t for t in optional if t is not None]
    results = [((steps, batch, layer.width), dtype), ((1, batch, layer.width), dtype)]
    if len(states) > 1:
        results.append(((1, batch, layer.units), dtype))

    def write(inputs: Sequence[Buffer], outputs: Sequence[Buffer]) -> None:
        xs, weight, *rest = inputs
        initial, others = rest[: len(states)], iter(rest[len(states) :])
        bias = None if layer.b_hh is None else next(others)
        projection = None if layer.w_hr is None else next(others)
        with loops(batch, parallel_work=steps * batch * layer.width * gates) as (row,):
            widths = (layer.width, layer.units)
            kept = [local(n, dtype) for n, _ in zip(widths, states, strict=False)]
            hidden, unprojected = local(gates, dtype), local(layer.units, dtype)
            for buffer, start, n in zip(kept, initial, widths, strict=False):
                with loops(n) as (k,):
                    store(buffer, start[layer.number, row, k], k)
            with loops(steps) as (step,):
                at = index(steps - 1) - step if layer.reverse else step
                _multiply(hidden, bias, kept[0], weight, layer.width, gates)
                target = kept[0] if projection is None else unprojected
                with loops(layer.units) as (unit,):
                    of_input = _Gates(xs, (at, row), layer.units, unit)
                    of_state = _Gates(hidden, (), layer.units, unit)
                    _CELLS[layer.kind](of_input, of_state, target, kept[-1], unit)
                if projection is not None:
                    _multiply(kept[0], None, unprojected, projection, layer.units, layer.width)
                with loops(layer.width) as (k,):
                    store(outputs[0], kept[0][k], at, row, k)
            for buffer, final, n in zip(kept, outputs[1:], widths, strict=False):
                with loops(n) as (k,):
                    store(final, buffer[k], index(0), row, k)

    found = emit_nest(bb, layer.kind, tensors, results, write)
    return tuple(bb.emit(relax.TupleGetItem(found, n)) for n in range(len(results)))


def _multiply(
    result: Buffer, bias: Buffer | None, vector: Buffer, matrix: Buffer, depth: int, width: int
) -> None:
    """Emit ``result = bias + vector @ matrix``."""
    with loops(width) as (j,):
        store(result, constant(0.0, str(result.dtype)) if bias is None else bias[j], j)
    at_once = _AT_ONCE if depth % _AT_ONCE == 0 else 1
    with loops(depth // at_once, width) as (block, j):
        total = result[j]
        for part in range(at_once):
            k = block * index(at_once) + index(part)
            total = total + vector[k] * matrix[k, j]
        store(result, total, j)


def _lstm(given: _Gates, hidden: _Gates, state: Buffer, cell: Buffer, unit: Expr) -> None:
    for gate, name in enumerate(("sigmoid", "sigmoid", "tanh", "sigmoid")):
        hidden.set(gate, FUNCTIONS[name](given(gate) + hidden(gate)))
    store(cell, hidden(1) * cell[unit] + hidden(0) * hidden(2), unit)
    store(state, hidden(3) * FUNCTIONS["tanh"](cell[unit]), unit)


def _gru(given: _Gates, hidden: _Gates, state: Buffer, cell: Buffer, unit: Expr) -> None:
    for gate in range(2):
        hidden.set(gate, FUNCTIONS["sigmoid"](given(gate) + hidden(gate)))
    hidden.set(2, FUNCTIONS["tanh"](given(2) + hidden(0) * hidden(2)))
    store(state, hidden(2) + hidden(1) * (state[unit] - hidden(2)), unit)


def _tanh(given: _Gates, hidden: _Gates, state: Buffer, cell: Buffer, unit: Expr) -> None:
    store(state, FUNCTIONS["tanh"](given(0) + hidden(0)), unit)


def _relu(given: _Gates, hidden: _Gates, state: Buffer, cell: Buffer, unit: Expr) -> None:
    value, zero = given(0) + hidden(0), constant(0.0, str(state.dtype))
    # A comparison that is false for NaN keeps NaN, as PyTorch's ReLU does.
    store(state, tirx.Select(value < zero, zero, value), unit)


_CELLS: dict[str, _Cell] = {"lstm": _lstm, "gru": _gru, "rnn_tanh": _tanh, "rnn_relu": _relu}

RECURRENT = {f"tvmbridge.{kind}_stack.default": recurrent for kind in _GATES}
