"""Find the parts of a module that need PyTorch at a call, and report all in one error."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from tvm import relax

from tvmbridge.core.captured_graph import CapturedGraph
from tvmbridge.core.errors import ExportError
from tvmbridge.core.types import InputKind, OutputKind
from tvmbridge.exporting.left import carried_over
from tvmbridge.frontend.origins import origin_of, origin_of_node
from tvmbridge.kernels.aten_call import aten_call_operator, compiled_call

# Layers of torch.ao.nn.quantized that compute with floats.
_OF_FLOATS = ("FloatFunctional", "FXFloatFunctional")
_PACKED = ("relax.call_pure_packed", "relax.call_dps_packed")


def effects(captured: CapturedGraph) -> list[str]:
    """Return what a call of a module does beyond returning results that code can compute.

    Each effect is named with the line of the model, if the trace knows it.
    """
    convention, places = captured.convention, _Lines(captured)
    found = [f"random draw {n.op}{places.of(n.name)}" for n in captured.noise]
    if captured.prologue is not None and not captured.noise:
        found.append("operators that run before the compiled code")
    if captured.epilogue is not None:
        names = ", ".join(captured.epilogue.functions)
        found.append(f"results whose shapes depend on values: {names}")
    if any(answer.arguments for answer in captured.assumptions.answers):
        found.append("forward branches by the values of its arguments")
    users = 0
    for output in captured.outputs:
        place = places.of(output.name)
        if output.kind is OutputKind.BUFFER_MUTATION or output.rebinds:
            found.append(f"forward writes into {output.target}{place}")
        elif output.kind is OutputKind.INPUT_MUTATION:
            found.append(f"forward writes into its argument {output.target}{place}")
        elif output.spec is not None and output.spec.dtype.is_complex:
            dtype = str(output.spec.dtype).removeprefix("torch.")
            found.append(f"result {users} is {dtype}{place}: return torch.view_as_real of it")
        elif output.alias is not None and output.alias.steps:
            found.append(f"output {output.name} is a view that strides do not describe")
        users += output.kind is OutputKind.USER
    found += [f"forward changes its argument {place}" for place in convention.changed_arguments]
    found += [f"forward keeps {name} from call to call" for name in carried_over(captured)]
    found += [
        f"argument {d.name} is complex: pass torch.view_as_real of it"
        for d in captured.inputs
        if d.kind is InputKind.USER and d.spec.dtype.is_complex
    ]
    return found


class _Lines:
    """Finds the submodule and the line of the model that a value of the graph comes from."""

    def __init__(self, captured: CapturedGraph) -> None:
        self._nodes = {node.name: node for node in captured.program.graph.nodes}

    def of(self, name: str) -> str:
        """Return the place of a value as text; "" if it is not known."""
        node = self._nodes.get(name)
        origin = None if node is None else origin_of_node(node)
        return "" if origin is None else origin.place


def refuse_packed_layers(module: nn.Module) -> None:
    """Refuse layers whose weights are packed for kernels of PyTorch: layers of torch.ao.

    Raises:
        ExportError: the message names the layers.
    """
    refuse(
        [
            f"{type(each).__module__}.{type(each).__name__} in {name or 'the module itself'}"
            for name, each in module.named_modules()
            if type(each).__module__.startswith("torch.ao.nn.")
            and "quantized" in type(each).__module__
            and type(each).__name__ not in _OF_FLOATS
        ]
    )


def leftovers(function: relax.Function) -> list[str]:
    """Return the operators of ``function`` that need PyTorch, with the lines of the model."""
    found: dict[str, None] = {}
    for block in function.body.blocks:
        for binding in block.bindings:
            value = binding.value
            name = None if not isinstance(value, relax.Call) else _needs_torch(value)
            if name is not None:
                found[f"{name}{_place(value)}"] = None
    return list(found)


def refuse(found: Sequence[str]) -> None:
    """Refuse a module because of everything in ``found``.

    Raises:
        ExportError: ``found`` is not empty.
    """
    if found:
        listed = "\n  ".join(found)
        raise ExportError(
            f"the module cannot run without PyTorch because of:\n  {listed}\n"
            "Move these out of the module that is exported, or export the parts around them."
        )


def _needs_torch(call: relax.Call) -> str | None:
    operator = aten_call_operator(call)
    if operator is not None:
        return None if compiled_call(call) is not None else operator
    if getattr(call.op, "name", "") in _PACKED and isinstance(call.args[0], relax.ExternFunc):
        return str(call.args[0].global_symbol)
    return None


def _place(call: relax.Call) -> str:
    origin = origin_of(call)
    return "" if origin is None else origin.place
