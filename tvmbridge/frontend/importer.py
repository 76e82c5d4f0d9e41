"""The importer walks a captured graph once and emits Relax, operator by operator."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import tvm
from torch import fx
from tvm import relax

from tvmbridge.backends import backend_of
from tvmbridge.core.admission import note_use
from tvmbridge.core.captured_graph import CapturedGraph
from tvmbridge.core.decisions import sizes_vary
from tvmbridge.core.errors import UnsupportedOperatorError
from tvmbridge.core.torch_private import FakeTensor, OpOverload
from tvmbridge.core.types import TensorSpec
from tvmbridge.frontend.limits import dtypes_of, may_convert, nbytes_of, refuse_what_cannot_run
from tvmbridge.frontend.origins import span_of_node
from tvmbridge.frontend.registry import CONVERTERS, HALVES, MOVED, Converter, Declined
from tvmbridge.frontend.widening import WIDE, convert_widened
from tvmbridge.graph_capture.noise import dropout_arguments
from tvmbridge.kernels.aten_call import emit_aten_call, zeros_call
from tvmbridge.kernels.borders import BORDERS
from tvmbridge.kernels.dtypes import as_pairs, has_type, tensor_type, to_relax_dtype
from tvmbridge.passes.base import SpanBuilder

aten = torch.ops.aten

# Constants up to this many bytes are folded into the graph; larger ones are computed by a call.
_MAX_FOLDED_BYTES = 1 << 20

# Checks that the sample passed and that the guard repeats. The graph needs none of them.
_ASSERTIONS = frozenset(
    {"aten::_assert_tensor_metadata", "aten::_assert_async", "aten::_assert_scalar"}
)


@dataclass
class Importer:
    """The state of one import.

    - ``builder``: emits the Relax bindings.
    - ``values``: the Relax variable of each fx node, or a tuple of them.
    - ``aten_calls``: the number of calls of ATen kernels, by operator.
    - ``native_calls``: the number of nodes that converters translated, by operator.
    """

    builder: SpanBuilder
    values: dict[fx.Node, Any] = field(default_factory=dict)
    aten_calls: dict[str, int] = field(default_factory=dict)
    native_calls: dict[str, int] = field(default_factory=dict)

    def emit(self, expr: relax.Expr) -> relax.Var:
        """Bind ``expr`` to a new variable."""
        return self.builder.emit(expr)

    def value(self, node: fx.Node) -> relax.Var:
        """Return the Relax variable of an fx node."""
        return self.values[node]

    def tensor(self, operand: Any, dtype: torch.dtype | None = None) -> relax.Expr:
        """Return a node's variable, or a number as a 0-d constant, cast to ``dtype``.

        Raises:
            Declined: the number does not fit the dtype, or no cast keeps PyTorch's meaning.
        """
        if not isinstance(operand, fx.Node):
            if dtype is None:
                raise Declined(f"a bare number {operand!r} where a tensor was expected")
            try:
                return relax.const(operand, to_relax_dtype(dtype))
            except OverflowError as error:
                raise Declined(f"{operand} does not fit {dtype}") from error
        value = self.value(operand)
        return value if dtype is None else self.cast(value, operand.meta["val"].dtype, dtype)

    def cast(self, value: relax.Expr, have: torch.dtype, want: torch.dtype) -> relax.Expr:
        """Cast ``value`` from dtype ``have`` to ``want``, as ``Tensor.to(want)`` does.

        Raises:
            Declined: a float would become an integer, which is undefined out of range.
        """
        if have == want:
            return value
        if want == torch.bool:
            return self.emit(relax.op.not_equal(value, relax.const(0, to_relax_dtype(have))))
        if have.is_floating_point and not want.is_floating_point:
            raise Declined("a float to integer conversion is undefined out of range")
        return self.emit(relax.op.astype(value, to_relax_dtype(want)))

    def convert(self, node: fx.Node) -> None:
        """Emit the Relax of one call node.

        Raises:
            UnsupportedOperatorError: the node can neither be converted nor called.
        """
        target = node.target
        if target is operator.getitem:
            source, index = node.args
            self.values[node] = self.values[source][index]  # type: ignore[index]
            return
        if not isinstance(target, OpOverload):
            operators = [str(a) for a in node.args if isinstance(a, OpOverload)]
            named = f"{target}({', '.join(operators)})" if operators else target
            raise UnsupportedOperatorError(
                f"the graph contains {named}, which is not an ATen operator"
            )
        if target._schema.name in _ASSERTIONS:
            return
        refuse_what_cannot_run(node)
        self.values[node] = self._convert_operator(node)

    def _convert_operator(self, node: fx.Node) -> Any:
        name = str(node.target)
        if node.target in BORDERS:  # The pass RemoveBorders removes them before compilation.
            return emit_aten_call(self.builder, node, self.values)
        if not node.all_input_nodes and not sizes_vary() and nbytes_of(node) <= _MAX_FOLDED_BYTES:
            return self._fold(node)
        converter = CONVERTERS.get(node.target)  # type: ignore[call-overload]
        if converter is not None and may_convert(node, converter):
            try:
                result = self._by(converter, node)
            except Declined:
                pass
            else:
                self.native_calls[name] = self.native_calls.get(name, 0) + 1
                note_use("converters", name, map(to_relax_dtype, dtypes_of(node)))
                return tuple(result) if isinstance(result, tuple) else self._bind(result)
        self.aten_calls[name] = self.aten_calls.get(name, 0) + 1
        return emit_aten_call(self.builder, node, self.values)

    def _by(self, converter: Converter, node: fx.Node) -> Any:
        if converter.widens and HALVES & dtypes_of(node):
            return convert_widened(self, node, converter)
        return converter.function(self, node, *node.args, **node.kwargs)

    def compiled_call(self, node: fx.Node) -> Any:
        """Emit an ATen call of ``node``, marked so that CompileAtenCalls replaces it by loops."""
        return emit_aten_call(self.builder, node, self.values, compiled=True)

    def _bind(self, expr: relax.Expr) -> relax.Expr:
        return expr if isinstance(expr, relax.Var) else self.emit(expr)

    def _fold(self, node: fx.Node) -> relax.Expr:
        """Run an operator that reads no tensor with PyTorch, and emit its result as a constant."""
        try:
            with torch.no_grad():
                result = node.target(*node.args, **node.kwargs)  # type: ignore[operator]
        except Exception as error:
            raise UnsupportedOperatorError(f"{node.target} makes no tensor: {error}") from error
        return self.constant(result)

    def constant(self, tensor: torch.Tensor) -> relax.Var:
        """Emit the values of ``tensor``, and return the variable."""
        if tensor.numel():
            return self.emit(constant(tensor))
        # A file of compiled code cannot hold an empty constant.
        pairs = as_pairs(tensor)
        return self.emit(
            zeros_call(list(pairs.shape), to_relax_dtype(pairs.dtype), str(pairs.device))
        )


def constant(tensor: torch.Tensor) -> tvm.ir.GenericConst:
    """Return a Relax constant with a copy of ``tensor``'s values.

    Raises:
        UnsupportedOperatorError: the tensor is a fake tensor, which has no values.
    """
    if isinstance(tensor, FakeTensor):
        raise UnsupportedOperatorError(
            f"forward reads a tensor of shape {tuple(tensor.shape)} that it made while it was "
            "traced and kept; its values are not known"
        )
    dense = as_pairs(tensor.detach()).cpu().contiguous()
    if dense.dtype is torch.bool:
        return relax.const(dense.numpy(), "bool")
    # NumPy has no bfloat16.
    values = tvm.runtime.from_dlpack(dense.clone())
    return relax.const(values, to_relax_dtype(dense.dtype))


@dataclass(frozen=True)
class ImportedModule:
    """The Relax of a captured graph.

    - ``mod``: the Relax module.
    - ``native_calls``: the number of nodes that converters translated, by operator.
    - ``aten_calls``: the number of calls of ATen kernels, by operator.
    """

    mod: tvm.IRModule
    native_calls: dict[str, int]
    aten_calls: dict[str, int]


@dataclass(frozen=True)
class GraphInput:
    """A parameter of the Relax function, and the fx node whose value it is.

    - ``name``: the name of the parameter.
    - ``spec``: the shape and dtype of the parameter. If the dtype differs from the node's, as for
      a mask of one byte an element, the parameter is cast.
    - ``node``: the fx node.
    """

    name: str
    spec: TensorSpec
    node: fx.Node


def import_graph(captured: CapturedGraph) -> ImportedModule:
    """Build the Relax function ``main`` of a captured graph.

    Its parameters are user inputs, parameters and buffers of the module, and random draws. It
    returns a flat tuple of the computed outputs in ``captured.outputs``, in their order. Dropout
    stays ``relax.nn.dropout``, without a parameter.

    Raises:
        UnsupportedOperatorError: an operator can neither be converted nor called.
    """
    nodes = {n.name: n for n in captured.program.graph.nodes}
    inputs = [GraphInput(d.name, d.spec, nodes[d.name]) for d in captured.primals]
    inputs += [
        GraphInput(d.name, d.spec, nodes[d.name])
        for d in captured.noise
        if d.drop_probability is None
    ]
    results = [nodes[o.name] for o in captured.outputs if o.is_computed]
    constants = {nodes[name]: tensor for name, tensor in captured.constant_tensors.items()}
    dropouts = {nodes[d.name] for d in captured.noise if d.drop_probability is not None}
    return _import("main", captured.program.graph, inputs, results, constants, dropouts)


def import_fx_graph(
    graph_module: fx.GraphModule, inputs: Sequence[GraphInput], name: str
) -> ImportedModule:
    """Build the Relax function ``name`` of a functional ATen graph with a flat output.

    Args:
        inputs: the parameters in their order, one for each placeholder.

    Raises:
        UnsupportedOperatorError: an operator can neither be converted nor called.
    """
    graph = graph_module.graph
    constants = {n: getattr(graph_module, str(n.target)) for n in graph.find_nodes(op="get_attr")}
    (results,) = graph.output_node().args
    return _import(name, graph, inputs, list(results), constants, set())  # type: ignore[arg-type]


def to_relax(captured: CapturedGraph) -> tvm.IRModule:
    """Return the Relax module of a captured graph; see :func:`import_graph`."""
    return import_graph(captured).mod


def _parameter(name: str, spec: TensorSpec) -> relax.Var:
    if not has_type(spec.dtype):
        raise UnsupportedOperatorError(f"input {name} has dtype {spec.dtype}")
    return relax.Var(name, tensor_type(spec.shape, spec.dtype))


def _import(
    name: str,
    graph: fx.Graph,
    inputs: Sequence[GraphInput],
    results: Sequence[fx.Node],
    constants: Mapping[fx.Node, torch.Tensor],
    dropouts: Collection[fx.Node],
) -> ImportedModule:
    """Build a function with one dataflow block; nodes in ``dropouts`` become relax.nn.dropout."""
    builder = SpanBuilder(relax.BlockBuilder(), None)
    importer = Importer(builder)
    # If a parameter replaces a result of an operator, the operator itself is not imported.
    drawing = {i.node.args[0] for i in inputs if i.node.target is operator.getitem}
    parameters = [_parameter(i.name, i.spec) for i in inputs]
    with builder.function(name, parameters):
        with builder.dataflow():
            for given, parameter in zip(inputs, parameters, strict=True):
                dtype = given.node.meta["val"].dtype
                importer.values[given.node] = importer.cast(parameter, given.spec.dtype, dtype)
            for node, tensor in constants.items():
                importer.values[node] = importer.constant(tensor)
            for node in graph.nodes:
                if node.op != "call_function" or node in importer.values or node in drawing:
                    continue
                builder.span = span_of_node(node)
                if node in dropouts:
                    importer.values[node] = _emit_dropout(importer, node)
                else:
                    importer.convert(node)
            builder.span = None
            values = [importer.value(r) for r in results]
            outputs = builder.emit_output(relax.Tuple(values))
        builder.emit_func_output(outputs)
    return ImportedModule(builder.get(), importer.native_calls, importer.aten_calls)


def _emit_dropout(importer: Importer, node: fx.Node) -> Any:
    """Emit ``relax.nn.dropout``, whose mask the pass LowerDropout turns into a parameter."""
    x, p, _ = dropout_arguments(node)
    if x.meta["val"].dtype not in MOVED:
        raise UnsupportedOperatorError(f"dropout of a {x.meta['val'].dtype} tensor")
    fake = x.meta["val"]
    in_float32 = fake.dtype in HALVES and backend_of(fake.device).drops_in_float32
    computed = WIDE if in_float32 else fake.dtype
    pair = importer.emit(relax.op.nn.dropout(importer.tensor(x, computed), p))
    result = importer.emit(relax.TupleGetItem(pair, 0))
    result = importer.cast(result, computed, fake.dtype)
    if node.target is aten.dropout.default:
        return result
    return result, importer.emit(relax.op.astype(relax.TupleGetItem(pair, 1), "bool"))
