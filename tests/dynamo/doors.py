"""Check whether a compiler runs a module whole: captured as one graph, with eager's results."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

import tvmbridge
from tests.architectures.compare import TOLERANCES, difference
from tvmbridge.dynamo import tvmbridge as backend

Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]
Door = Callable[[nn.Module, Arguments], Callable[..., Any]]


def _ours(module: nn.Module, _: Arguments) -> Callable[..., Any]:
    options = {"smallest_graph": 1}
    return torch.compile(module, backend=backend, fullgraph=True, options=options)


def _inductor(module: nn.Module, _: Arguments) -> Callable[..., Any]:
    return torch.compile(module, fullgraph=True)


def _export(module: nn.Module, sample: Arguments) -> Callable[..., Any]:
    return torch.export.export(module, sample[0], dict(sample[1])).module()


def _script(module: nn.Module, _: Arguments) -> Callable[..., Any]:
    scripted: Callable[..., Any] = torch.jit.script(module)
    return scripted


DOORS: Mapping[str, Door] = {
    "tvmbridge": _ours,
    "inductor": _inductor,
    "torch.export": _export,
    "TorchScript": _script,
}


def through(door: str, module: nn.Module, calls: Sequence[Arguments]) -> str:
    """Run the calls without gradients through a compiler, and compare with eager PyTorch.

    The seed is set before each call, but other compilers may draw other random numbers.

    Returns:
        ``"whole"``; ``"no"`` if the compiler refuses or leaves calls to eager PyTorch; ``"wrong"``
        if results differ.
    """
    torch.compiler.reset()
    found, expected = [], []
    with torch.no_grad():
        reference = copy.deepcopy(module)
        for args, kwargs in calls:
            torch.manual_seed(0)
            expected.append(reference(*copy.deepcopy(args), **copy.deepcopy(dict(kwargs))))
        try:
            called = DOORS[door](module, copy.deepcopy(calls[0]))
            for args, kwargs in calls:
                torch.manual_seed(0)
                found.append(called(*copy.deepcopy(args), **copy.deepcopy(dict(kwargs))))
        except Exception:  # each compiler raises its own errors
            return "no"
    if door == "tvmbridge" and not _served():
        return "no"
    departure = difference(found, expected, TOLERANCES[torch.float32])
    return "whole" if departure is None else "wrong"


def _served() -> bool:
    graphs = tvmbridge.compile_report().graphs
    # A graph without operators needs no code.
    return bool(graphs) and all(graph.whole for graph in graphs if graph.operators)
