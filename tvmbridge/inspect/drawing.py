"""Turn one Relax function into the nodes and edges of a picture."""

import linecache
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tvm
from tvm import relax
from tvm.ir import Call

from tvmbridge.frontend.origins import origin_of
from tvmbridge.inspect import labels
from tvmbridge.inspect.asked import NodeAttributes, Surroundings, handle
from tvmbridge.inspect.canvas import Canvas, Operand, Result
from tvmbridge.inspect.labels import DOT, full_type_text
from tvmbridge.inspect.styles import Attributes
from tvmbridge.passes.base import shape_of, tensor_bytes

_SHOWN_FIELDS = 4


class FunctionDrawing(Canvas):
    """Draws one function as a picture of its own; :meth:`draw` is called once.

    Args:
        prefix: the prefix of the nodes' names, which must differ between functions of a picture.
        collapse_small: whether small values are written inside the nodes that use them.
    """

    def __init__(
        self,
        name: str,
        *,
        prefix: str,
        collapse_small: bool,
        attributes: NodeAttributes,
        known: Surroundings,
    ) -> None:
        super().__init__(prefix, known)
        self.name = name
        self.names: set[str] = set()
        self._collapse = collapse_small
        self._attributes = attributes
        self._values: dict[int, Operand] = {}
        # Tuples that no drawn node uses yet: a tuple that is only returned never becomes a node.
        self._waiting: dict[int, tuple[relax.Tuple, Result]] = {}
        self._returned: set[int] = set()

    def draw(self, function: relax.Function) -> None:
        """Draw the whole function."""
        attrs = function.attrs or {}
        inputs = int(attrs["num_input"]) if "num_input" in attrs else len(function.params)
        leading = True
        for position, param in enumerate(function.params):
            self._note_name(param)
            kind = "weight" if position >= inputs or self._is_state(param) else "input"
            # Arguments of forward come first; random draws and cotangents come after the weights.
            leading = leading and kind == "input"
            around = () if leading else self._around(param)
            self._values[handle(param)] = self._variable(param, kind, around)
        result = self._sequence(function.body)
        for expr, path, asked in self._leaves(result, (), {}):
            self._output(expr, path, asked)
        for key in [key for key in self._waiting if key not in self._returned]:
            self._values[key] = self._draw(*self._waiting.pop(key))
        params = [self._values[handle(param)] for param in function.params]
        self._leave_out_unread([node for param in params for node in param.nodes])

    def _output(self, expr: relax.Expr, path: tuple[int, ...], asked: Attributes) -> None:
        """Draw the node of a result; a gradient's node is in the frame of the gradient's value."""
        gradient = self._known.gradients.get(path[0]) if len(path) == 1 else None
        title = f"output {'.'.join(map(str, path))}".rstrip()
        shown = Result("", expr.ty, asked)
        operands = [self._operand(expr)]
        if gradient is None:
            self._operation(title, operands, shown, kind="output")
        else:
            around = self._around(expr if isinstance(expr, relax.Var) else None)
            title = f"gradient of {gradient}"
            self._operation(title, operands, shown, kind="gradient", around=around)

    def _is_state(self, param: relax.Var) -> bool:
        """Whether the name of ``param`` is that of a captured module's parameter or buffer."""
        return bool(self._known.places) and param.name.startswith(("p_", "b_"))

    def _note_name(self, var: relax.Var) -> None:
        self.names |= {var.name, f"{self.name}/{var.name}"}

    def _leaves(
        self, expr: relax.Expr, path: tuple[int, ...], asked: Attributes
    ) -> Iterator[tuple[relax.Expr, tuple[int, ...], Attributes]]:
        """Yield the values in a result, each with its path in nested tuples and its attributes."""
        value, result = self._waiting.get(handle(expr), (expr, None))
        if not (self._collapse and isinstance(value, relax.Tuple) and value.fields):
            yield expr, path, asked
            return
        self._returned.add(handle(expr))
        asked = asked | (result.asked if result else self._attributes.of(self.name, expr))
        for position, item in enumerate(value.fields):
            yield from self._leaves(item, (*path, position), asked)

    def _sequence(self, expr: relax.Expr) -> relax.Expr:
        """Draw the bindings of a sequence, and return its result, which is not drawn yet."""
        if not isinstance(expr, relax.SeqExpr):
            return expr
        for binding in [binding for block in expr.blocks for binding in block.bindings]:
            self._bind(binding)
        return expr.body

    def _bind(self, binding: relax.Binding) -> None:
        var, value = binding.var, binding.value
        self._note_name(var)
        asked = self._attributes.of(self.name, value, var)
        result = Result(var.name, var.ty, asked, var, value)
        if isinstance(binding, relax.MatchCast):
            operand = self._operation("match_cast", [self._operand(value)], result)
        elif self._collapse and isinstance(value, relax.Tuple):
            self._waiting[handle(var)] = (value, result)
            return
        elif self._is_in_place(value, asked):
            operand = self._operand(value)
        else:
            operand = self._draw(value, result)
        self._values[handle(var)] = operand

    def _is_in_place(self, expr: relax.Expr, asked: Attributes) -> bool:
        if not self._collapse:
            return False
        if isinstance(expr, relax.TupleGetItem):
            source = self._operand(expr.tuple_value)
        elif handle(expr) in self._values:
            source = self._values[handle(expr)]
        else:
            return not asked and labels.literal_text(expr) is not None
        return not asked or any(asked == self._asked_of_node[node] for node in source.nodes)

    def _operand(self, expr: relax.Expr) -> Operand:
        """Return how ``expr`` appears where it is used; draw its node first if it needs one."""
        if handle(expr) in self._values:
            return self._values[handle(expr)]
        waiting = self._waiting.pop(handle(expr), None)
        asked = self._attributes.of(self.name, expr)
        if waiting is not None:
            operand = self._draw(*waiting)
        elif self._is_in_place(expr, asked):
            return self._text_in_place(expr)
        elif self._collapse and isinstance(expr, relax.Tuple) and not asked:
            return self._tuple_in_place(expr)
        else:
            operand = self._draw(expr, Result("", expr.ty, asked))
        if labels.literal_text(expr) is None:
            self._values[handle(expr)] = operand
        return operand

    def _text_in_place(self, expr: relax.Expr) -> Operand:
        if not isinstance(expr, relax.TupleGetItem):
            return Operand(labels.literal_text(expr) or "")
        source = expr.tuple_value
        if isinstance(source, relax.Tuple):
            return self._operand(source.fields[expr.index])
        operand = self._operand(source)
        return Operand(f"{operand.text}[{expr.index}]", operand.nodes)

    def _tuple_in_place(self, expr: relax.Tuple) -> Operand:
        fields = [self._operand(item) for item in expr.fields]
        texts = [item.text for item in fields]
        if len(texts) > _SHOWN_FIELDS and all(text == DOT for text in texts):
            texts = [DOT, "…", DOT]
        return Operand(f"({', '.join(texts)})", tuple(n for item in fields for n in item.nodes))

    def _draw(self, expr: relax.Expr, result: Result) -> Operand:
        """Draw the expression as a node of its own."""
        if isinstance(expr, Call):
            parts = labels.call_parts(expr)
            operands = [self._operand(item) for item in parts.operands]
            detail = labels.attributes_text(expr)
            return self._operation(parts.title, operands, result, detail=detail, kind=parts.kind)
        if isinstance(expr, relax.If):
            return self._draw_if(expr, result)
        if isinstance(expr, relax.SeqExpr):
            return self._operand(self._sequence(expr))
        if isinstance(expr, relax.Tuple):
            return self._draw_tuple(expr, result)
        if isinstance(expr, relax.TupleGetItem):
            sources = [self._operand(expr.tuple_value)]
            return self._operation(f"item {expr.index}", sources, result, kind="tuple")
        if isinstance(expr, relax.Function):
            free = [self._operand(var) for var in relax.analysis.free_vars(expr)]
            return self._operation("local function", free, result, kind="function")
        if isinstance(expr, relax.Var) and handle(expr) in self._values:
            return self._operation("alias", [self._operand(expr)], result, kind="small")
        return self._draw_leaf(expr, result)

    def _draw_tuple(self, expr: relax.Tuple, result: Result) -> Operand:
        fields = []
        for item in expr.fields:
            if isinstance(item, relax.Tuple):  # inlined, its fields would seem to be this tuple's
                asked = self._attributes.of(self.name, item)
                fields.append(self._draw(item, Result("", item.ty, asked)))
            else:
                fields.append(self._operand(item))
        return self._operation("tuple", fields, result, kind="tuple")

    def _draw_leaf(self, expr: relax.Expr, result: Result) -> Operand:
        title = labels.literal_text(expr) or labels.function_name(expr)
        if title is None and isinstance(expr, relax.Var):
            return self._variable(expr, "free", self._around(expr))
        kind = type(expr).__name__.replace("GenericConst", "constant")
        return self._operation(title or kind, [], result, kind="small")

    def _draw_if(self, expr: relax.If, result: Result) -> Operand:
        operands = [self._operand(expr.cond)]
        for label, branch in (("then", expr.true_branch), ("else", expr.false_branch)):
            with self._framed(label):
                operands.append(self._operand(self._sequence(branch)))
        places = ("condition", "then", "else")
        return self._operation("if", operands, result, kind="branch", places=places)

    def _variable(self, var: relax.Var, kind: str, around: tuple[str, ...]) -> Operand:
        asked = self._attributes.of(self.name, var)
        facts = facts_of("", "", var, None, {})
        label = labels.variable_label(var.name, var.ty)
        return self._node(label, kind, asked, around, facts)

    def _operation(
        self,
        title: str,
        operands: Sequence[Operand],
        result: Result,
        *,
        detail: str = "",
        kind: str = "op",
        places: Sequence[str] = (),
        around: tuple[str, ...] | None = None,
    ) -> Operand:
        """Draw a node for an expression with operands, and the edges from its operands."""
        texts = [operand.text for operand in operands]
        label = labels.operation_label(title, texts, detail, result.name, result.type)
        facts = facts_of(title, detail, result.var, result.value, self._known.seconds)
        around = self._around(result.var) if around is None else around
        node = self._node(label, kind, result.asked, around, facts)
        self._edges(operands, node.nodes[0], places)
        return node


def facts_of(
    title: str,
    detail: str,
    var: relax.Var | None,
    expr: relax.Expr | None,
    seconds: Mapping[relax.Var, float],
) -> dict[str, Any]:
    """Return the known facts about a value by name; unknown facts are left out."""
    known: dict[str, Any] = {"operator": title, "attributes": detail}
    if var is not None:
        known |= {"variable": var.name, "type": full_type_text(var.ty), "bytes": nbytes(var.ty)}
        known["seconds"] = seconds.get(var)
    origin = origin_of(expr)
    if origin is not None:
        known["submodule"] = origin.modules[-1][0] if origin.modules else ""
        if origin.file:
            known["source"] = f"{Path(origin.file).name}:{origin.line} in {origin.function}"
            known["code"] = linecache.getline(origin.file, origin.line).strip()
    return {name: value for name, value in known.items() if value not in (None, "")}


def nbytes(ty: Any) -> int | None:
    """Return the bytes of a tensor, or of all tensors of a tuple; None if a size is unknown."""
    if isinstance(ty, tvm.ir.TupleType):
        fields = [nbytes(field) for field in ty.fields]
        return None if None in fields else sum(f for f in fields if f is not None)
    if not isinstance(ty, relax.TensorType) or ty.dtype is None:
        return None
    value = relax.Var("value", ty)
    try:
        return None if shape_of(value) is None else tensor_bytes(value)
    except (AttributeError, KeyError, TypeError, ValueError):
        return None  # PyTorch does not have the dtype
