"""Compilations that stop early, after the capture or the differentiation; PyTorch runs the result.

The backends ``tvmbridge_eager``, ``tvmbridge_aot`` and ``tvmbridge`` run one more stage each. If a
numerical difference appears in one of them but not in the one before, the added stage causes it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import tvm
from torch.utils.dlpack import from_dlpack

from tvmbridge.backends import backend_of
from tvmbridge.compiler.build import Built
from tvmbridge.compiler.compiled import CompiledModule, compile_module
from tvmbridge.compiler.request import CompileRequest
from tvmbridge.core.errors import CaptureError, UnsupportedOperatorError
from tvmbridge.core.options import CompileOptions
from tvmbridge.core.types import PassRecord
from tvmbridge.dynamo.calls import CompiledGraph
from tvmbridge.dynamo.graphs import DynamoGraph
from tvmbridge.inspect.compare.interpreter import RelaxRun
from tvmbridge.passes.base import flat_results
from tvmbridge.passes.relax.bundle_residuals import BundleResiduals
from tvmbridge.records import Coverage

_NO_CODE = "off: nothing is compiled"


def captured_graph(graph: DynamoGraph, options: CompileOptions) -> CompiledGraph:
    """Return ``graph`` as captured: PyTorch runs and differentiates it."""
    return CompiledGraph(graph, options, _captured)


def differentiated_graph(graph: DynamoGraph, options: CompileOptions) -> CompiledGraph:
    """Return ``graph`` with Relax forward and backward, which PyTorch runs operator by operator."""
    return CompiledGraph(replace(graph, symbolic=False), options, _differentiated)


def _captured(request: CompileRequest) -> CompiledModule:
    raise CaptureError("tvmbridge_eager stops after the capture")


def _differentiated(request: CompileRequest) -> CompiledModule:
    return compile_module(request, _Interpreted)


class _Interpreted:
    """A replacement of the build by TVM that runs the Relax functions operator by operator."""

    def __init__(
        self, target: tvm.target.Target, options: CompileOptions, device: torch.device
    ) -> None:
        if not backend_of(device).runs_alone:
            raise UnsupportedOperatorError(f"tvmbridge_aot runs on the CPU, not on {device}")

    def __call__(
        self, mod: tvm.IRModule, records: list[PassRecord], bundle: BundleResiduals | None = None
    ) -> Built:
        functions = {g.name_hint: f for g, f in mod.functions_items()}
        machine = {name: _running(name, f, bundle) for name, f in functions.items()}
        # Each result may share memory with an argument or with another result.
        shared = {name: frozenset(range(len(flat_results(f)))) for name, f in functions.items()}
        return Built(_Machine(machine), {}, shared, Coverage(), {}, _NO_CODE)


class _Machine(dict[str, Callable[..., list[Any]]]):
    def __missing__(self, name: str) -> Callable[..., list[Any]]:
        raise AttributeError(name)


def _running(name: str, function: Any, bundle: BundleResiduals | None) -> Callable[..., list[Any]]:
    def run(*arguments: Any) -> list[Any]:
        given = [_tensor(a) for a in arguments]
        if bundle is not None and name == "backward":
            given[bundle.first : bundle.first + 1] = given[bundle.first]
        results = RelaxRun(function, given).results
        if bundle is None or name != "forward":
            return results
        return [*results[: bundle.num_outputs], tuple(results[bundle.num_outputs :])]

    return run


def _tensor(value: Any) -> Any:
    return value if isinstance(value, torch.Tensor | tuple) else from_dlpack(value)
