"""Which submodule each value of a Relax function belongs to.

A call that came from PyTorch says so itself (:mod:`tvmbridge.frontend.origins`). What a pass has
added stands with what reads it, and a parameter with all that read it. What a gradient has added
stands with what of forward it reads: the gradient of an operator reads its inputs or its result.
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

Modules = tuple[tuple[str, str], ...]


def places(
    function: relax.Function, gradients: Mapping[relax.Var, relax.Var] | None = None
) -> dict[relax.Var, Modules]:
    """The submodules of each variable of ``function``, from the outside to the inside.

    Args:
        gradients: of a joint function, the parameter by the variable that is its gradient. Of a
            backward function alone nothing is guessed.
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
        for gradient, parameter in gradients.items():
            if parameters.get(parameter):
                found.setdefault(gradient, parameters[parameter])
        _behind_forward(bindings, reads, found, forward, parameters)
        _from_readers(bindings, reads, found)
    return {**_of_parameters(function.params, reads, found), **found}


def with_places(joint: JointModule) -> JointModule:
    """A joint function whose calls all say where they belong, so that its parts can be drawn."""
    function = joint.mod["joint"]
    results, named = flat_results(function), {p.name: p for p in function.params}
    wanted = [named[name] for name in joint.wanted]
    gradients = dict(zip(results[joint.num_outputs :], wanted, strict=True))
    found = places(function, {g: p for g, p in gradients.items() if isinstance(g, relax.Var)})
    told = [_told(b, found.get(b.var)) for b in _bindings(function)]
    made = build_function("joint", function.params, told, results)
    return replace(joint, mod=tvm.IRModule({"joint": made}))


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
    """Items of tuples, and other names of a value, stand with it."""
    for binding in bindings:
        if isinstance(binding.value, relax.TupleGetItem | relax.Var):
            known = [found[v] for v in reads[binding.var] if v in found]
            if known:
                found.setdefault(binding.var, known[0])


def _from_readers(
    bindings: list[relax.Binding], reads: Reads, found: dict[relax.Var, Modules]
) -> None:
    """What is not known stands with the first that reads it."""
    first: dict[relax.Var, Modules] = {}
    for binding in reversed(bindings):
        modules = found.get(binding.var, first.get(binding.var))
        if modules is None or isinstance(binding.value, relax.Tuple):
            continue
        found[binding.var] = modules
        for operand in reads[binding.var]:
            first[operand] = modules


def _behind_forward(
    bindings: list[relax.Binding],
    reads: Reads,
    found: dict[relax.Var, Modules],
    forward: Mapping[relax.Var, Modules],
    parameters: Mapping[relax.Var, Modules],
) -> None:
    """What is not known stands with the parameter that it reads, or the last value of forward."""
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


def _of_parameters(
    parameters: Iterable[relax.Var], reads: Reads, found: Mapping[relax.Var, Modules]
) -> dict[relax.Var, Modules]:
    """What all readers of a parameter have in common."""
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
