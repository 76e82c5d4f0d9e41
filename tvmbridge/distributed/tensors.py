"""The parameters and buffers of a rank, by their names in the whole module."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from tvmbridge.core.errors import PipelineError
from tvmbridge.core.reached import reached
from tvmbridge.distributed.graph import PipelineGraph
from tvmbridge.distributed.splitting import StageModule


class StageTensors:
    """The tensors of the stages of one rank.

    - ``parameters``: the parameters that the stages read, by the first name of each in the module.
    - ``names``: the names of the whole module's state, in its order.
    """

    def __init__(self, module: nn.Module, graph: PipelineGraph) -> None:
        state = module.state_dict(keep_vars=True)
        self.names = tuple(state)
        self.parameters: dict[str, nn.Parameter] = {}
        self._aliases: dict[int, list[str]] = {}
        for name, tensor in state.items():
            self._aliases.setdefault(id(tensor), []).append(name)
        self._first_names = {id(p): name for name, p in reversed([*module.named_parameters()])}
        used = {id(t) for node in graph.nodes for t in _read(graph, node)}
        self._unused = {n: t for n, t in state.items() if id(t) not in used}
        self._graph = graph
        self._own: dict[str, torch.Tensor] = {}

    def add(self, stage: StageModule) -> None:
        """Add the tensors of a stage, which are on its device."""
        for attribute, name in stage.names.items():
            original = self._graph.tensors[name]
            tensor = getattr(stage.module, attribute)
            if isinstance(tensor, nn.Parameter):
                self.parameters.setdefault(self._first_names.get(id(original), name), tensor)
            for alias in self._aliases.get(id(original), ()):
                self._own.setdefault(alias, tensor)

    def state_dict(self, *, include_unused: bool) -> dict[str, torch.Tensor]:
        """Return the tensors by all of their names; optionally also those that no stage reads."""
        found = {**self._own, **(self._unused if include_unused else {})}
        return {name: found[name].detach() for name in self.names if name in found}

    def load(self, state: Mapping[str, torch.Tensor], *, include_unused: bool) -> None:
        """Copy from ``state`` into the tensors of this rank.

        Raises:
            PipelineError: a tensor is missing, or has another shape; nothing is changed.
        """
        own = self.state_dict(include_unused=include_unused)
        missing = [name for name in own if name not in state]
        if missing:
            raise PipelineError(f"the state has no {', '.join(missing[:5])}")
        for name, tensor in own.items():
            if state[name].shape != tensor.shape:
                raise PipelineError(
                    f"{name} is {list(tensor.shape)}, in the state {list(state[name].shape)}"
                )
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(state[name])


def _read(graph: PipelineGraph, node: torch.fx.Node) -> list[torch.Tensor]:
    readers = reached([node], lambda n: [r for r in n.all_input_nodes if r in graph.recomputed])
    return [graph.tensors[name] for reader in readers for name in graph.read_tensors(reader)]
