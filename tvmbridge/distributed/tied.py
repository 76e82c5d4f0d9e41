"""Sum the gradients of parameters that stages on several ranks share, after each step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from tvmbridge.core.errors import PipelineError
from tvmbridge.distributed.batches import digest
from tvmbridge.distributed.control import Control
from tvmbridge.distributed.tensors import StageTensors


class TiedGradients:
    """Sums the gradients of shared parameters, so that equal optimizers keep the copies equal."""

    def __init__(self, tensors: StageTensors, control: Control) -> None:
        self._control = control
        self._parameters = tensors.parameters
        owners: dict[str, list[int]] = {}
        for rank, names in enumerate(control.gather(list(tensors.parameters), "for shared names")):
            for name in names:
                owners.setdefault(name, []).append(rank)
        self._owners = {name: ranks for name, ranks in sorted(owners.items()) if len(ranks) > 1}
        self._compare()
        self._groups: dict[tuple[int, ...], Any] = {}
        for ranks in self._owners.values():
            if tuple(ranks) not in self._groups:
                self._groups[tuple(ranks)] = control.new_group(ranks)

    def _compare(self) -> None:
        """Check that a shared parameter has equal values on all ranks."""
        shared = {n: p for n, p in self._parameters.items() if n in self._owners}
        mine = {name: digest(parameter)[0] for name, parameter in shared.items()}
        found = self._control.gather(mine, "to compare shared parameters")
        for name, (first, *others) in self._owners.items():
            for rank in others:
                if found[rank][name] != found[first][name]:
                    raise PipelineError(
                        f"{self._control.describe(rank)} and {self._control.describe(first)} share "
                        f"{name}, and begin with different values; seed all ranks alike"
                    )

    def counts_here(self, name: str) -> bool:
        """Whether this rank adds a shared parameter to the total norm; exactly one rank does."""
        return self._owners.get(name, [self._control.rank])[0] == self._control.rank

    @contextmanager
    def added_up(self) -> Iterator[None]:
        """On exit, sum the gradients of shared parameters that ranks computed in this context."""
        own = [n for n in self._owners if n in self._parameters]
        own = [n for n in own if self._parameters[n].requires_grad]
        before = {name: self._parameters[name].grad for name in own}
        for name in own:
            self._parameters[name].grad = None
        yield
        for name in own:
            parameter = self._parameters[name]
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=self._groups[tuple(self._owners[name])])
            earlier = before[name]
            if earlier is not None:
                parameter.grad += earlier
