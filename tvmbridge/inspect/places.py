"""Find the submodule that each value of a Relax function belongs to.

A call imported from PyTorch has its submodule recorded in it (:mod:`tvmbridge.frontend.origins`).
The others are inferred. A value that a pass has added, or a parameter, belongs to the innermost
submodule that contains all values that read it. A value that differentiation has added belongs to
the submodule of the forward value or parameter that it reads: the gradient of an operator reads the
operator's inputs or result.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace

import tvm
from tvm import relax

from tvmbridge.compiler.split import build_function
from tvmbridge.differentiation.differentiate import JointModule
from tvmbridge.frontend.origins import Origin, origin_of
from tvmbridge.passes.base import flat_results, with_span
from tvmbridge.passes.relax.dead_code_elimination import DeadCodeElimination

Modules = tuple[tuple[str, str], ...]


def places(
    function: relax.Function, gradients: Mapping[relax.Expr, str] | None = None
) -> dict[relax.Var, Modules]:
    """Return the submodules of each variable of ``function``, from the outermost to the innermost.

    Variables with unknown submodules are left out.

    Args:
        gradients: for a joint function, its results that are gradients of parameters, each with
            the path of the submodule that holds the parameter. None: do not infer the submodules
            of backward's values from the forward values that they read.
    """
    bindings = _bindings(function)
    reads = {b.var: relax.analysis.free_vars(b.value) for b in bindings}
    found: dict[relax.Var, Modules] = {}
    for binding in bindings:
        origin = origin_of(binding.value)
        if origin is not None:
            found[binding.var] = origin.modules
    if not found:
        return {}
    _from_operands(bindings, reads, found)
    _from_readers(bindings, reads, found)
    if gradients is not None:
        forward, parameters = dict(found), _of_parameters(function.params, reads, found)
        known = {m[i][0]: m[: i + 1] for m in forward.values() for i in range(len(m))}
        for gradient, path in gradients.items():
            if path in known:
                found.setdefault(gradient, known[path])
        _behind_forward(bindings, reads, found, forward, parameters)
        _from_readers(bindings, reads, found)
    return {**_of_parameters(function.params, reads, found), **found}


def with_places(joint: JointModule, holders: Mapping[str, str]) -> JointModule:
    """Record its submodule in each call of a joint function, so that forward and backward have it.

    ``holders`` has, for each parameter by name, the path of the submodule that holds it.
    """
    function = joint.mod["joint"]
    results = flat_results(function)
    gradients = zip(results[joint.num_outputs :], joint.wanted, strict=True)
    found = places(function, {g: holders[name] for g, name in gradients if name in holders})
    told = [_told(b, found.get(b.var)) for b in _bindings(function)]
    made = tvm.IRModule({"joint": build_function("joint", function.params, told, results)})
    # Nothing reads the tuple of the old result any more.
    return replace(joint, mod=DeadCodeElimination(("joint",))(made))


def _told(binding: relax.Binding, modules: Modules | None) -> relax.Binding:
    if modules is None:
        return binding
    return relax.VarBinding(binding.var, with_span(binding.value, Origin(modules).span()))


def _bindings(function: relax.Function) -> list[relax.Binding]:
    if not isinstance(function.body, relax.SeqExpr):
        return []
    return [b for block in function.body.blocks for b in block.bindings]


Reads = Mapping[relax.Var, Iterable[relax.Var]]


def _from_operands(
    bindings: list[relax.Binding], reads: Reads, found: dict[relax.Var, Modules]
) -> None:
    """Give items of tuples, and aliases of a value, the submodules of the tuple or the value."""
    for binding in bindings:
        if isinstance(binding.value, relax.TupleGetItem | relax.Var):
            known = [found[v] for v in reads[binding.var] if v in found]
            if known:
                found.setdefault(binding.var, known[0])


def _from_readers(
    bindings: list[relax.Binding], reads: Reads, found: dict[relax.Var, Modules]
) -> None:
    """Give each unplaced value the submodules that all its readers have in common."""
    readers: dict[relax.Var, list[Modules]] = defaultdict(list)
    for binding in reversed(bindings):
        if isinstance(binding.value, relax.Tuple):
            continue
        if binding.var not in found and readers[binding.var]:
            found[binding.var] = _common(readers[binding.var])
        if binding.var in found:
            for operand in reads[binding.var]:
                readers[operand].append(found[binding.var])


def _behind_forward(
    bindings: list[relax.Binding],
    reads: Reads,
    found: dict[relax.Var, Modules],
    forward: Mapping[relax.Var, Modules],
    parameters: Mapping[relax.Var, Modules],
) -> None:
    """Place each unplaced call of backward with the values that it reads.

    It gets the submodules of a parameter that it reads, otherwise of the last forward value that
    it reads. If it reads neither, it gets the submodules that all its operands have in common.
    """
    number = {b.var: i for i, b in enumerate(bindings)}
    for binding in bindings:
        if binding.var in found or not isinstance(binding.value, relax.Call):
            continue
        weights = [parameters[v] for v in reads[binding.var] if parameters.get(v)]
        values = [v for v in reads[binding.var] if v in forward]
        if weights:
            found[binding.var] = weights[0]
        elif values:
            found[binding.var] = forward[max(values, key=number.__getitem__)]
        else:
            known = [found[v] for v in reads[binding.var] if v in found]
            if known:
                found[binding.var] = _common(known)


def _of_parameters(
    parameters: Iterable[relax.Var], reads: Reads, found: Mapping[relax.Var, Modules]
) -> dict[relax.Var, Modules]:
    """Return, for each parameter, the submodules that all its readers have in common."""
    readers: dict[relax.Var, list[Modules]] = defaultdict(list)
    for var, operands in reads.items():
        if var in found:
            for operand in operands:
                readers[operand].append(found[var])
    return {p: _common(readers[p]) for p in parameters if readers[p]}


def _common(several: list[Modules]) -> Modules:
    shortest = min(several, key=len)
    length = 0
    while length < len(shortest) and all(m[length] == shortest[length] for m in several):
        length += 1
    return shortest[:length]
