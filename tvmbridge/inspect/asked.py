"""Data that a picture shows in addition to the function: attributes, submodules, times."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import tvm
from tvm import relax

from tvmbridge.inspect.places import Modules
from tvmbridge.inspect.styles import Attributes


def handle(expr: relax.Expr) -> int:
    """Return a number that is equal for two Python objects of the same Relax expression."""
    return hash(expr)  # of the TVM object, because each access creates a new Python wrapper


@dataclass(frozen=True)
class NodeAttributes:
    """The graphviz attributes that a user asked for.

    - ``names``: attributes by variable name.
    - ``handles``: attributes by the :func:`handle` of an expression.
    """

    names: Mapping[str, Attributes]
    handles: Mapping[int, Attributes]

    def of(self, function: str, *expressions: relax.Expr) -> Attributes:
        """Return the attributes of some expressions in a function.

        Attributes by expression override attributes by name.
        """
        variables = [expr.name for expr in expressions if isinstance(expr, relax.Var)]
        found: Attributes = {}
        for name in [*variables, *(f"{function}/{name}" for name in variables)]:
            found |= self.names.get(name, {})
        for expr in expressions:
            found |= self.handles.get(handle(expr), {})
        return found


@dataclass(frozen=True)
class Surroundings:
    """Facts about a function that are not in the function itself.

    - ``places``: the submodules of each variable.
    - ``seconds``: for each variable whose time was measured, the seconds that its call takes.
    - ``gradients``: for each result that is a gradient, by its number, the name of its parameter
      or input.
    """

    places: Mapping[relax.Var, Modules] = field(default_factory=dict)
    seconds: Mapping[relax.Var, float] = field(default_factory=dict)
    gradients: Mapping[int, str] = field(default_factory=dict)


def node_attributes(node_attr_dict: object) -> NodeAttributes:
    """Check a ``node_attr_dict``, and return its attributes by name and by expression.

    Raises:
        TypeError: it is not a dict of dicts, or a key is neither a name nor an expression.
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
    """Raise ValueError with suggestions if a wanted name is not among the drawn names."""
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
