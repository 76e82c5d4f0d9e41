"""Whether a module runs whole through a compiler: captured as one graph, with eager's results."""

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
    """*whole*, *no* (refused, or run by eager PyTorch), or *wrong*: without gradients.

    The seed is set before each call; where eager PyTorch draws, other compilers may draw others.
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
        except Exception:  # each refuses in its own way
            return "no"
    if door == "tvmbridge" and not _served():
        return "no"
    departure = difference(found, expected, TOLERANCES[torch.float32])
    return "whole" if departure is None else "wrong"


def _served() -> bool:
    graphs = tvmbridge.compile_report().graphs
    # Of a graph without operators there is nothing to compile.
    return bool(graphs) and all(graph.whole for graph in graphs if graph.operators)
