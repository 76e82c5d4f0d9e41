"""Find the gradients of products with a common left operand, for CombineGradientMatmul."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tvm import relax

from tvmbridge.core.reached import reached
from tvmbridge.passes.base import is_call, readers_of, shape_of
from tvmbridge.passes.relax.parallel_products import Views, views_of


@dataclass(frozen=True)
class Flow:
    """The gradient of a product's input: ``var`` = ``cotangent`` @ ``weight``."""

    var: relax.Var
    cotangent: relax.Var
    weight: relax.Var

    @property
    def width(self) -> int:
        """The number of rows of ``weight``."""
        return (shape_of(self.weight) or ())[0]


@dataclass(frozen=True)
class Sum:
    """A sum of the products of several flows and of other terms.

    - ``root``: the variable of the sum.
    - ``others``: the other terms.
    """

    root: relax.Var
    others: tuple[relax.Expr, ...]


class GradientGraph:
    """The bindings of a function with one dataflow block, and the readers of each variable.

    - ``parameters``: the parameters by name.
    - ``bound``: the value of each variable; ``order`` its position.
    - ``simple``: whether there is one block, of variable bindings alone.
    - ``operands``: the variables that the value of each variable reads.
    - ``readers``: the variables whose values read a variable; None stands for the result.
    - ``with_right``: the products of two matrices whose right operand is no view, by that operand.
    - ``with_transposed``: the products whose left operand is a transpose, by what is transposed.
    """

    def __init__(self, function: relax.Function) -> None:
        bindings = [b for block in function.body.blocks for b in block.bindings]
        self.parameters = {p.name: p for p in function.params}
        self.bound = {b.var: b.value for b in bindings}
        self.order = {b.var: i for i, b in enumerate(bindings)}
        self.simple = len(function.body.blocks) == 1 and all(
            isinstance(b, relax.VarBinding) for b in bindings
        )
        self.operands = {v: list(relax.analysis.free_vars(e)) for v, e in self.bound.items()}
        self.readers = readers_of(function)
        self.with_right: dict[relax.Expr, list[Flow]] = {}
        self.with_transposed: dict[Views, list[relax.Var]] = {}
        for var, value in self.bound.items():
            if is_call(value, "relax.matmul"):
                self._sort_product(var, *value.args)

    def _sort_product(self, var: relax.Var, left: relax.Expr, right: relax.Expr) -> None:
        root, steps = views_of(right, self.bound)
        if not steps and isinstance(left, relax.Var) and len(shape_of(left) or ()) == 2:
            self.with_right.setdefault(root, []).append(Flow(var, left, root))
        transposed = self._transposed(left)
        if transposed is not None and len(shape_of(right) or ()) == 2:
            self.with_transposed.setdefault(transposed, []).append(var)

    def flows(self, names: tuple[str, ...]) -> list[Flow] | str:
        """Return, for each of the weights ``names``, the product that is the input's gradient.

        If there is not one product for each weight, return the reason.
        """
        if not self.simple:
            return "not one dataflow block"
        if len(set(names)) < len(names):
            return "a weight stands in it twice"
        flows = []
        for name in names:
            weight = self.parameters.get(name)
            found = [] if weight is None else self.with_right.get(weight, [])
            if len(found) != 1:
                return f"{len(found)} products with {name} instead of one"
            flows += found
        rows = {(shape_of(f.cotangent) or ())[0] for f in flows}
        return flows if len(rows) == 1 else "they have different numbers of rows"

    def _only_reader(self, var: relax.Var) -> relax.Var | None:
        readers = self.readers.get(var, [])
        return readers[0] if len(readers) == 1 else None

    def _is_plain_sum(self, var: relax.Var | None) -> bool:
        value = self.bound.get(var) if var is not None else None
        if not is_call(value, "relax.add") or not isinstance(value, relax.Call):
            return False
        return all(shape_of(a) is not None and shape_of(a) == shape_of(var) for a in value.args)

    def sum_of(self, flows: Sequence[Flow]) -> Sum | str:
        """Return the one sum that all the products are terms of, or the reason if there is none."""
        leaves = []
        roots = set()
        for flow in flows:
            var = flow.var
            reader = self._only_reader(var)
            while reader is not None and is_call(self.bound[reader], "relax.reshape"):
                var, reader = reader, self._only_reader(reader)
            leaves.append(var)
            while reader is not None and self._is_plain_sum(reader):
                var, reader = reader, self._only_reader(reader)
            roots.add(var)
        if len(roots) != 1 or roots & set(leaves):
            return "they are not added up"
        (root,) = roots
        terms = self._terms(root, root)
        if any(terms.count(leaf) != 1 for leaf in leaves):
            return "they are not added up"
        return Sum(root, tuple(t for t in terms if t not in leaves))

    def _terms(self, var: relax.Expr, root: relax.Var) -> list[relax.Expr]:
        if not isinstance(var, relax.Var) or not self._is_plain_sum(var):
            return [var]
        if var is not root and self._only_reader(var) is None:
            return [var]
        return [t for operand in self.bound[var].args for t in self._terms(operand, root)]

    def stack_of(self, flows: Sequence[Flow]) -> dict[relax.Var, relax.Expr] | str:
        """Return the gradients of the weights, in order, with the common input that they read.

        If they cannot be combined, return the reason.
        """
        found: dict[relax.Var, relax.Expr] = {}
        inputs = []
        for flow in flows:
            cotangent = views_of(flow.cotangent, self.bound)
            for var in self.with_transposed.get(cotangent, ()):
                found[var] = right = self.bound[var].args[1]
                inputs.append(views_of(right, self.bound))
        if len(found) != len(flows) or any(i != inputs[0] for i in inputs):
            return "not one product each, with a common input"
        if self._depend_on_each_other(found):
            return "one depends on another"
        return found

    def _transposed(self, expr: relax.Expr) -> Views | None:
        """Return what ``expr`` is the transpose of, as views of a tensor; None if it is none."""
        value = self.bound.get(expr) if isinstance(expr, relax.Var) else None
        if not isinstance(value, relax.Call) or not is_call(value, "relax.permute_dims"):
            return None
        return views_of(value.args[0], self.bound)

    def _depend_on_each_other(self, variables: Iterable[relax.Var]) -> bool:
        """Whether the value of one of ``variables`` is computed from another one."""
        wanted = set(variables)
        first = min(self.order[var] for var in wanted)
        read = [operand for var in wanted for operand in self.operands[var]]
        # A value reads only variables that are bound before it.
        inputs = reached(read, lambda v: self.operands[v] if self.order.get(v, -1) > first else ())
        return not wanted.isdisjoint(inputs)
