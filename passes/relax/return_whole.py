"""If several results of a function are the pieces of one tensor, it returns that tensor instead.

Before::

    lv = R.split(x, [2, 5])             # x: R.Tensor((9,), "float32"), computed here
    a = lv[0]
    b = lv[1]
    c = lv[2]
    gv = (b, y, a, c)
    return gv

After::

    gv = (x, y)                         # attribute: x has the former results 2, 0 and 3
    return gv

The caller cuts it into views (:class:`~tvmbridge.compiler.pieces.Pieces`), as the gradients of
``torch.cat`` and ``torch.stack`` share memory in eager PyTorch. Loops would copy each piece, and
a hundred small gradients would cost a hundred conversions between TVM's tensors and PyTorch's.

Requires: one dataflow block, static shapes. Guarantees: the other results keep their order. The
pass declines pieces that something else reads or that are not contiguous, and tensors that share
memory with an argument or another result.
Runs after: all passes that refer to gradients by number. Runs before: CopyPieces.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import tvm
from tvm import relax

from tvmbridge.passes.base import (
    PassReport,
    RelaxPass,
    binding,
    bindings_of,
    flat_results,
    is_call,
    map_functions,
    shape_of,
    storage_root,
    storage_roots,
    with_bindings,
)
from tvmbridge.passes.relax.dead_code_elimination import DeadCodeElimination

_ATTRIBUTE = "tvmbridge.wholes"


@dataclass(frozen=True)
class Whole:
    """A result of a function that the caller cuts into several results.

    - ``number``: its index among the results of the function.
    - ``places``: the indices that its pieces, in order, had among the results before the pass.
    - ``extents``: the extent of each piece along ``axis``.
    - ``axis``: the dimension that is cut.
    """

    number: int
    places: tuple[int, ...]
    extents: tuple[int, ...]
    axis: int


def wholes_of(function: relax.Function) -> list[Whole]:
    """Return the results that the caller has to cut, from an attribute that the pass wrote."""
    written = (function.attrs or {}).get(_ATTRIBUTE)
    found = [] if written is None else json.loads(str(written))
    return [Whole(w["number"], tuple(w["places"]), tuple(w["extents"]), w["axis"]) for w in found]


@dataclass(frozen=True)
class ReturnWhole(RelaxPass):
    """Let a function return a tensor itself instead of the pieces that it is split into.

    Args:
        function: the name of the function.
    """

    function: str = "backward"

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        def rewrite(function: relax.Function) -> relax.Function:
            splits = _splits(function, report)
            report.rewrote(len(splits))
            return _returning(function, splits) if splits else function

        return map_functions(mod, rewrite, self.function)


def _splits(function: relax.Function, report: PassReport) -> list[tuple[relax.Expr, Whole]]:
    """Return the tensors that are split into results, and which results their pieces are."""
    bound, results = bindings_of(function), flat_results(function)
    roots = [r for r in storage_roots(function) if r is not None]
    places: dict[relax.Var, list[tuple[int, int]]] = {}
    for place, result in enumerate(results):
        value = bound.get(result)
        if isinstance(value, relax.TupleGetItem):
            places.setdefault(value.tuple_value, []).append((int(value.index), place))
    places = {pieces: taken for pieces, taken in places.items() if _is_split(bound.get(pieces))}
    if not places:
        return []
    uses = _uses(function)
    found = []
    for pieces, taken in places.items():
        call = bound[pieces]
        assert isinstance(call, relax.Call)
        reason = _refusal(call, taken, uses, pieces, [results[p] for _, p in taken])
        root = storage_root(call.args[0], bound)
        if reason is None and (root is None or root in function.params or root in roots):
            reason = "its memory is that of an argument or of another result"
        if reason is not None:
            report.decline("relax.split", reason)
            continue
        roots.append(root)
        axis, ordered = int(call.attrs.axis), tuple(place for _, place in sorted(taken))
        extents = tuple(int(results[place].ty.shape.values[axis]) for place in ordered)
        found.append((call.args[0], Whole(0, ordered, extents, axis)))
    return found


def _is_split(value: relax.Expr | None) -> bool:
    return is_call(value, "relax.split")


def _refusal(
    call: relax.Call,
    taken: Sequence[tuple[int, int]],
    uses: Counter[relax.Expr],
    pieces: relax.Var,
    results: Sequence[relax.Expr],
) -> str | None:
    count = len(call.ty.fields)
    shape = shape_of(call.args[0])
    if shape is None or any(shape_of(r) is None for r in results):
        return "sizes are symbolic"
    if any(extent > 1 for extent in shape[: int(call.attrs.axis)]):
        return "its pieces are not contiguous"
    once = len({place for place, _ in taken}) == len(taken) == count == uses[pieces]
    if not once or any(uses[result] != 1 for result in results):
        return "a piece is used otherwise"
    return None


def _uses(function: relax.Function) -> Counter[relax.Expr]:
    """Count how often each variable is read."""
    found: Counter[relax.Expr] = Counter()
    for value in bindings_of(function).values():
        relax.analysis.post_order_visit(value, lambda expr: found.update([expr]))
    return found


def _returning(
    function: relax.Function, splits: Sequence[tuple[relax.Expr, Whole]]
) -> relax.Function:
    (block,) = function.body.blocks
    of_place = {place: i for i, (_, whole) in enumerate(splits) for place in whole.places}
    fields: list[relax.Expr] = []
    numbers: dict[int, int] = {}
    for place, result in enumerate(flat_results(function)):
        split = of_place.get(place)
        if split is None:
            fields.append(result)
        elif split not in numbers:
            numbers[split] = len(fields)
            fields.append(splits[split][0])
    wholes = [asdict(whole) | {"number": numbers[i]} for i, (_, whole) in enumerate(splits)]
    result = relax.Var("results", relax.TupleType([field.ty for field in fields]))
    bindings = [b for b in block.bindings if b.var != function.body.body]
    whole = with_bindings(function, [*bindings, binding(result, relax.Tuple(fields))], result)
    whole = whole.with_attr(_ATTRIBUTE, json.dumps(wholes))
    name = str(whole.attrs["global_symbol"])
    return DeadCodeElimination()(tvm.IRModule({name: whole}))[name]
