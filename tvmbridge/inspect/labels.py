"""The texts of a drawing: short labels of Relax expressions, and their escaping for graphviz."""

import html
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax
from tvm.ir import Call, GenericConst, Op, StringImm, is_prim_expr

#: The text in a label for an operand that an edge shows.
DOT = "·"
#: A constant of at most this many elements is written out.
SMALL_CONSTANT = 4

_TITLE_CHARS = 44
_LINE_CHARS = 56
_NAME_CHARS = 30
_TYPE_CHARS = 48
_TOOLTIP_CHARS = 600
_ATTRIBUTE_CHARS = 24
_ATTRIBUTES_CHARS = 56
_ONLY_DOTS = re.compile(rf"[{DOT}(),… ]*")
_SCRIPT_LITERAL = re.compile(r"\bT\.\w+\((-?[\w.+-]+)\)")
_PLAIN_LAYOUTS = frozenset({"NCW", "OIW", "NCHW", "OIHW", "NCDHW", "OIDHW", "IOW", "IOHW"})
_FUNCTION_CALLS = {
    "relax.call_tir": "tir",
    "relax.call_tir_inplace": "tir",
    "relax.call_tir_with_grad": "tir",
    "relax.call_dps_packed": "packed",
    "relax.call_pure_packed": "packed",
    "relax.call_inplace_packed": "packed",
    "relax.call_builtin_with_ctx": "packed",
}
#: Calls whose arguments are in one tuple.
_TUPLE_CALLS = frozenset(_FUNCTION_CALLS) - {"relax.call_pure_packed", "relax.call_inplace_packed"}
#: Default values of attributes, which are not shown, by attribute name.
_NEUTRAL = {
    "strides": "1",
    "dilation": "1",
    "groups": "1",
    "padding": "0",
    "output_padding": "0",
    "center": "True",
    "scale": "True",
}


@dataclass(frozen=True)
class CallParts:
    """A call as its node shows it.

    - ``title``: the name of the operator, or of the called function.
    - ``kind``: ``"op"``, ``"tir"``, ``"packed"``, ``"aten"`` or ``"function"``.
    - ``operands``: the arguments, without the called function and without an ATen call's spec.
    """

    title: str
    kind: str
    operands: tuple[relax.Expr, ...]


@dataclass(frozen=True)
class Label:
    """A node's label: shortened as graphviz HTML, and in full as plain text for the tooltip."""

    html: str
    tooltip: str


def shorten(text: str, limit: int) -> str:
    """Return ``text`` on one line of at most ``limit`` characters, without its middle if longer."""
    text = " ".join(text.split())
    if len(text) <= limit:
        return text
    head = (limit - 1) * 2 // 3
    return f"{text[:head]}…{text[len(text) - (limit - 1 - head) :]}"


def variable_label(name: str, ty: Any) -> Label:
    """Return the label of a variable without binding, such as ``x: (2, 128) float32``."""
    short, kind = shorten(name, _NAME_CHARS), type_text(ty)
    line = _joined(short, kind)
    lines = [line] if len(line) <= _TITLE_CHARS else [f"{short}:", kind]
    return Label(_html(lines), _tooltip([_joined(name, full_type_text(ty))]))


def operation_label(title: str, operands: Sequence[str], detail: str, name: str, ty: Any) -> Label:
    """Return the label of an expression with operands.

    It has the title, the operands unless edges show all of them, the attributes (``detail``), and
    the result's name and type.
    """
    texts = ", ".join(operands)
    arguments = "" if _ONLY_DOTS.fullmatch(texts) else f"({texts})"
    head = [shorten(title, _TITLE_CHARS), shorten(arguments, _LINE_CHARS)]
    if len("".join(head)) <= _TITLE_CHARS:
        head = ["".join(head)]
    small = _joined(shorten(name, _NAME_CHARS), type_text(ty))
    tooltip = _tooltip([title + arguments, detail, _joined(name, full_type_text(ty))])
    return Label(_html([*head, detail], small), tooltip)


def group_label(name: str, title: str, inside: int) -> str:
    """Return the label of a folded submodule: its name, its class, and its number of operators."""
    return _html([name, title], f"{inside} operator{'s' * (inside != 1)}")


def _joined(name: str, kind: str) -> str:
    return ": ".join(text for text in (name, kind) if text)


def _tooltip(texts: Sequence[str]) -> str:
    text = shorten(" | ".join(text for text in texts if text), _TOOLTIP_CHARS)
    # dot interprets a tooltip's escapes twice, so that no number of backslashes gives one.
    return _printable(text).replace("\\", "\N{SET MINUS}")


def _html(lines: Sequence[str], small: str = "") -> str:
    shown = [escaped(line) for line in lines if line]
    if small:
        shown.append(f'<FONT POINT-SIZE="9" COLOR="#5f6368">{escaped(small)}</FONT>')
    return f"<{'<BR/>'.join(shown) or ' '}>"


def escaped(text: str) -> str:
    """Escape ``text`` for graphviz HTML."""
    # dot interprets backslash escapes even in HTML labels: \N would become the node's name.
    return html.escape(_printable(text)).replace("\\", "\\\\")


def _printable(text: str) -> str:
    # XML allows no control characters: dot would refuse the label, and a browser the picture.
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def type_text(ty: Any, limit: int = _TYPE_CHARS) -> str:
    """Return a Relax type as a short text: `(2, 128) float32`, `tuple of 5`, `shape (n, 4)`."""
    return shorten(full_type_text(ty), limit)


def full_type_text(ty: Any) -> str:
    if isinstance(ty, relax.TensorType):
        return f"{_tensor_shape(ty)} {'any dtype' if ty.dtype is None else ty.dtype}"
    if isinstance(ty, tvm.ir.TupleType):
        if len(ty.fields) > 3:
            return f"tuple of {len(ty.fields)}"
        return f"[{', '.join(full_type_text(field) for field in ty.fields)}]"
    if isinstance(ty, relax.ShapeType):
        if ty.values is None:
            return "shape" if ty.ndim < 0 else f"shape of {ty.ndim}"
        return f"shape {_row(ty.values)}"
    if isinstance(ty, tvm.ir.PrimType):
        return str(ty.dtype)
    if isinstance(ty, relax.FuncType):
        return "function"
    return "object" if isinstance(ty, relax.AnyType) else ""


def _tensor_shape(ty: relax.TensorType) -> str:
    if isinstance(ty.shape, relax.ShapeExpr):
        return _row(ty.shape.values)
    if ty.shape is not None:
        return f"({getattr(ty.shape, 'name', '?')})"
    return "(…)" if ty.ndim < 0 else f"({', '.join('?' * ty.ndim)})"


def _row(values: Any) -> str:
    items = [_value_text(value) for value in values]
    return f"({', '.join(items)}{',' if len(items) == 1 else ''})"


def _value_text(value: Any) -> str:
    """Return a size, a literal or an attribute as text, without the syntax of TVM's printer."""
    if isinstance(value, tvm.tirx.IntImm) and value.ty.dtype == "bool":
        return str(bool(value.value))
    if isinstance(value, tvm.tirx.IntImm):
        return str(int(value.value))
    if isinstance(value, float | tvm.tirx.FloatImm):
        return _float_text(float(getattr(value, "value", value)))
    if isinstance(value, StringImm):
        return json.dumps(str(value.value), ensure_ascii=False)
    if isinstance(value, list | tuple | tvm.ir.Array):
        return _row(value)
    return _SCRIPT_LITERAL.sub(r"\1", str(value).strip().rpartition("\n")[2])


def _float_text(value: float) -> str:
    text = f"{value:.6g}"
    return f"{text}.0" if text.lstrip("-").isdigit() else text


def literal_text(expr: relax.Expr) -> str | None:
    """Return the text of an expression that is small enough to be written where it is used.

    Small are scalars and tiny constants, shapes, numbers, symbolic sizes and strings. Return None
    for all other expressions.
    """
    if isinstance(expr, GenericConst):
        return _constant_text(expr)
    if isinstance(expr, relax.ShapeExpr):
        return shorten(_row(expr.values), _TITLE_CHARS)
    if isinstance(expr, StringImm) or is_prim_expr(expr):
        return shorten(_value_text(expr), _ATTRIBUTE_CHARS)
    return None


def _constant_text(expr: GenericConst) -> str | None:
    shape = getattr(expr.ty, "shape", None)
    if not isinstance(shape, relax.ShapeExpr) or len(shape) > 1:
        return None
    if len(shape) == 1 and int(shape[0]) > SMALL_CONSTANT:
        return None
    try:
        values = expr.value.numpy().tolist()
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return None  # numpy does not have the dtype
    if not len(shape):
        values = [values]
    items = [_float_text(v) if isinstance(v, float) else str(v) for v in values]
    return f"[{', '.join(items)}]" if len(shape) else items[0]


def attributes_text(call: Call) -> str:
    """Return the short attributes of a call that differ from defaults: ``axis=1, keepdims``."""
    texts: list[str] = []
    for name, value in _attribute_items(call.attrs):
        if name == "out_dtype" and value == getattr(call.ty, "dtype", None):
            continue
        text = _attribute_text(name, value)
        if text and len(text) <= _ATTRIBUTE_CHARS + len(name):
            texts.append(text)
    return shorten(", ".join(texts), _ATTRIBUTES_CHARS)


def _attribute_items(attrs: Any) -> list[tuple[str, Any]]:
    if attrs is None:
        return []
    if isinstance(attrs, tvm.ir.DictAttrs):
        return [(str(name), attrs[name]) for name in attrs.keys()]  # noqa: SIM118  (no mapping)
    info = getattr(type(attrs), "__tvm_ffi_type_info__", None)
    return [(field.name, getattr(attrs, field.name)) for field in getattr(info, "fields", ())]


def _attribute_text(name: str, value: Any) -> str:
    if value is None or value is False or (isinstance(value, str) and not value):
        return ""
    if name.endswith("layout") and value in _PLAIN_LAYOUTS:
        return ""
    single = isinstance(value, list | tuple | tvm.ir.Array) and len(value) == 1
    text = _value_text(value[0] if single else value)
    if name in _NEUTRAL and set(re.findall(r"[\w.]+", text)) <= {_NEUTRAL[name]}:
        return ""
    return name if value is True else f"{name}={text}"


def call_parts(call: Call) -> CallParts:
    """Return a call's name, kind and operands, as a drawing shows them."""
    arguments = tuple(call.args)
    if not isinstance(call.op, Op):
        callee = function_name(call.op)
        operands = arguments if callee else (call.op, *arguments)
        return CallParts(callee or "call", "function", operands)
    kind = _FUNCTION_CALLS.get(call.op.name)
    callee = function_name(arguments[0]) if kind and arguments else None
    if kind is None or callee is None:
        return CallParts(call.op.name.removeprefix("relax."), "op", arguments)
    operands = arguments[1:]
    if call.op.name in _TUPLE_CALLS and operands and isinstance(operands[0], relax.Tuple):
        operands = (*operands[0].fields, *operands[1:])
    if operands and isinstance(operands[0], StringImm):
        aten = _aten_name(str(operands[0].value))
        if aten:
            return CallParts(aten, "aten", operands[1:])
    return CallParts(callee, kind, operands)


def function_name(expr: Any) -> str | None:
    """Return the name of a global or external function; None for any other expression."""
    if isinstance(expr, tvm.ir.GlobalVar):
        return str(expr.name_hint)
    return str(expr.global_symbol) if isinstance(expr, relax.ExternFunc) else None


def _aten_name(text: str) -> str | None:
    if text.startswith("{"):
        try:
            described = json.loads(text)
        except ValueError:
            return None
        text = str(described.get("op", "")) if isinstance(described, dict) else ""
    if not re.fullmatch(r"\w+(\.\w+)+", text):
        return None
    return text.removesuffix(".default")
