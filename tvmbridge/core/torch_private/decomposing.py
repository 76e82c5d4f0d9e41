"""How ``ExportedProgram.run_decompositions`` prepares PyTorch, and how it removes writes."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch._dispatch.python
import torch._subclasses.functional_tensor
import torch.export.exported_program
from torch.fx.experimental.proxy_tensor import make_fx

_untyped: Any = torch
_FunctionalTensor = torch._subclasses.functional_tensor.FunctionalTensor
_FunctionalTensorMode = torch._subclasses.functional_tensor.FunctionalTensorMode


class WritesOperandError(Exception):
    """Raised if a function writes into an operand that must not be written."""


@contextmanager
def as_run_decompositions(module: torch.fx.GraphModule, table: Any) -> Iterator[tuple[Any, Any]]:
    """Enter the contexts in which ``run_decompositions(table)`` traces ``module``.

    Yield the mode of the module's fake tensors, and the table without the composite operators,
    which are decomposed by kernels instead. The mode is None, and nothing entered, if there are no
    fake tensors.
    """
    exported: Any = torch.export.exported_program
    trace = importlib.import_module("torch.export._trace")
    mode = exported._detect_fake_mode_from_gm(module)
    if mode is None:
        yield None, table
        return
    composites, decompositions = exported._split_decomp_table_to_cia_and_python_decomp(dict(table))
    with (
        mode,
        exported._override_composite_implicit_decomp(composites),
        trace._ignore_backend_decomps(),
        trace._compiling_state_context(),
        torch.no_grad(),
    ):
        yield mode, decompositions


def is_preserved(func: Any) -> bool:
    """Whether a composite operator stays whole within :func:`as_run_decompositions`."""
    exported: Any = torch.export.exported_program
    kernel = func.py_kernels.get(torch._C.DispatchKey.CompositeImplicitAutograd)
    return kernel is exported._special_op_to_preserve_cia


def traced_without_writes(
    function: Callable[..., Any], operands: list[Any], table: Any, may_write: int
) -> torch.fx.Graph:
    """Return the graph of ``function(*operands)``, decomposed by ``table``, with writes removed.

    Args:
        operands: fake tensors, and numbers that are symbols.
        may_write: the number of operands, from the first on, that the function may write into.

    Raises:
        WritesOperandError: the function writes into another operand.
    """

    def called(*given: Any) -> Any:
        functionalize = torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize)
        with torch._C._ExcludeDispatchKeyGuard(functionalize):
            held = [_functional(operand) for operand in given]
            results = function(*held)
            unwritten = [h for h in held[may_write:] if isinstance(h, _FunctionalTensor)]
            if any(_untyped._functionalize_has_data_mutation(h.elem) for h in unwritten):
                raise WritesOperandError
            return torch.utils._pytree.tree_map(_value_of, results)

    without_writes: Any = _FunctionalTensorMode(
        pre_dispatch=False, export=True, _allow_token_discovery=True
    )
    with torch._dispatch.python.enable_python_dispatcher(), without_writes:
        traced = make_fx(called, table, pre_dispatch=False)(*operands)
    assert isinstance(traced, torch.fx.GraphModule)
    return traced.graph


def _functional(operand: Any) -> Any:
    if not isinstance(operand, torch.Tensor):
        return operand
    made: Any = _FunctionalTensor.to_functional(operand)
    return made


def _value_of(result: Any) -> Any:
    if not isinstance(result, _FunctionalTensor):
        return result
    _untyped._sync(result)
    return _untyped._from_functional_tensor(result.elem)
