"""Find the parts of a module that need PyTorch at a call, and report all in one error."""

from __future__ import annotations

from collections.abc import Iterable

from tvm import relax

from tvmbridge.core.captured_graph import CapturedGraph
from tvmbridge.core.errors import ExportError
from tvmbridge.core.types import InputKind, OutputKind
from tvmbridge.exporting.left import carried_over
from tvmbridge.frontend.origins import origin_of
from tvmbridge.kernels.aten_call import aten_call_operator, compiled_call

_PACKED = ("relax.call_pure_packed", "relax.call_dps_packed")


def refuse_effects(captured: CapturedGraph) -> None:
    """Refuse a module whose calls do more than return results.

    Raises:
        ExportError: the message names all such effects.
    """
    _refuse(effects(captured))


def effects(captured: CapturedGraph) -> list[str]:
    """Return what a call of a module does beyond returning results that code can compute."""
    convention = captured.convention
    found = [f"random draw {n.op}" for n in captured.noise]
    if captured.prologue is not None and not captured.noise:
        found.append("operators that run before the compiled code")
    if captured.epilogue is not None:
        names = ", ".join(captured.epilogue.functions)
        found.append(f"results whose shapes depend on values: {names}")
    for output in captured.outputs:
        if output.kind is OutputKind.BUFFER_MUTATION or output.rebinds:
            found.append(f"forward writes into {output.target}")
        elif output.kind is OutputKind.INPUT_MUTATION:
            found.append(f"forward writes into its argument {output.target}")
        elif output.alias is not None and output.alias.steps:
            found.append(f"output {output.name} is a view that strides do not describe")
    found += [f"forward changes its argument {place}" for place in convention.changed_arguments]
    found += [f"forward keeps {name} from call to call" for name in carried_over(captured)]
    found += [
        f"argument {d.name} is complex"
        for d in captured.inputs
        if d.kind is InputKind.USER and d.spec.dtype.is_complex
    ]
    return found


def refuse_leftovers(function: relax.Function) -> None:
    """Refuse calls of ``function`` that need PyTorch.

    Raises:
        ExportError: the message names each operator once, with the line of the model.
    """
    found: dict[str, None] = {}
    for block in function.body.blocks:
        for binding in block.bindings:
            value = binding.value
            name = None if not isinstance(value, relax.Call) else _needs_torch(value)
            if name is not None:
                found[f"{name}{_place(value)}"] = None
    _refuse(found)


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


def _refuse(found: Iterable[str]) -> None:
    lines = list(found)
    if lines:
        listed = "\n  ".join(lines)
        raise ExportError(
            f"the module cannot run without PyTorch because of:\n  {listed}\n"
            "Move these out of the module that is exported, or export the parts around them."
        )
