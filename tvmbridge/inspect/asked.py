"""What a picture is asked to show beside the function: attributes, submodules, measured times."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import tvm
from tvm import relax

from tvmbridge.inspect.places import Modules
from tvmbridge.inspect.styles import Attributes


def handle(expr: relax.Expr) -> int:
    """A number that two Python objects share if they are the same Relax expression."""
    return hash(expr)  # of the TVM object: Python makes a new wrapper at each look


@dataclass(frozen=True)
class NodeAttributes:
    """The attributes that a user asked for, by variable name and by expression."""

    names: Mapping[str, Attributes]
    handles: Mapping[int, Attributes]

    def of(self, function: str, *expressions: relax.Expr) -> Attributes:
        """What was asked for these expressions: by the expression goes before by its name."""
        variables = [expr.name for expr in expressions if isinstance(expr, relax.Var)]
        found: Attributes = {}
        for name in [*variables, *(f"{function}/{name}" for name in variables)]:
            found |= self.names.get(name, {})
        for expr in expressions:
            found |= self.handles.get(handle(expr), {})
        return found


@dataclass(frozen=True)
class Surroundings:
    """What is known of a function beside itself.

    The submodules of its variables, how long they took, and of which parameters or inputs its
    results are the gradients, by the results' numbers.
    """

    places: Mapping[relax.Var, Modules] = field(default_factory=dict)
    seconds: Mapping[relax.Var, float] = field(default_factory=dict)
    gradients: Mapping[int, str] = field(default_factory=dict)


def node_attributes(node_attr_dict: object) -> NodeAttributes:
    """The attributes of a ``node_attr_dict``.

    Raises:
        TypeError: it is no dict of dicts, or has another key than a name or an expression.
    """
    if not isinstance(node_attr_dict, Mapping):
        raise TypeError(
            "node_attr_dict maps Relax expressions or variable names to graphviz attributes, and "
            f"is a {type(node_attr_dict).__name__}: pass a dict"
        )
    by_name: dict[str, Attributes] = {}
    by_handle: dict[int, Attributes] = {}
    for key, values in node_attr_dict.items():
        if not isinstance(key, str | tvm.ir.Expr):
            raise TypeError(
                f"node_attr_dict has the key {key!r} of type {type(key).__name__}: use a Relax "
                "variable, a bound expression, or a variable's name"
            )
        shown = key if isinstance(key, str) else getattr(key, "name", type(key).__name__)
        if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
            raise TypeError(
                f"node_attr_dict[{shown!r}] is {values!r}: give a dict of graphviz attributes, as "
                'in {"color": "red"}'
            )
        texts = {name: str(value) for name, value in values.items()}
        if isinstance(key, str):
            by_name[key] = texts
        else:
            by_handle[handle(key)] = texts
    return NodeAttributes(by_name, by_handle)


def check_names(wanted: Iterable[str], drawn: Iterable[str]) -> None:
    """Raises ValueError if a name that was asked for is none of those drawn; it suggests some."""
    known = set(drawn)
    unknown = sorted(set(wanted) - known)
    if not unknown:
        return
    close = [match for name in unknown for match in difflib.get_close_matches(name, known, n=2)]
    hint = f" (did you mean {', '.join(map(repr, dict.fromkeys(close)))}?)" if close else ""
    raise ValueError(
        f"node_attr_dict names {', '.join(map(repr, unknown))}, which no drawn function has{hint}: "
        "use the name of a variable in the printed function, or function/variable"
    )
