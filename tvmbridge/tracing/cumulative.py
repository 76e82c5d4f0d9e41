"""Batch norm with a cumulative average, made traceable.

With ``momentum=None`` a batch norm reads the number of batches from its buffer, as a Python number,
to weigh the new statistics. A trace cannot have that number: it would be frozen. Within
:func:`cumulative_averages_on_tensors` the weight stays a tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import MethodType
from unittest import mock

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

_forward = _BatchNorm.forward


@contextmanager
def cumulative_averages_on_tensors(module: nn.Module) -> Iterator[None]:
    """Within it batch norms with ``momentum=None`` compute with tensors alone in train mode.

    Args:
        module: what is traced; a forward that its batch norms hold themselves is replaced too.
    """
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(_BatchNorm, "forward", _forward_on_tensors))
        for norm in module.modules():
            own = norm.__dict__.get("forward")
            if isinstance(own, MethodType) and own.__func__ is _forward:
                bound = MethodType(_forward_on_tensors, norm)
                stack.enter_context(mock.patch.dict(norm.__dict__, forward=bound))
        yield


def _forward_on_tensors(self: _BatchNorm, input: torch.Tensor) -> torch.Tensor:
    count, averages = self.num_batches_tracked, (self.running_mean, self.running_var)
    if self.momentum is not None or not self.training or not self.track_running_stats:
        return _forward(self, input)
    if count is None or averages[0] is None or averages[1] is None:
        return _forward(self, input)
    self._check_input_dim(input)
    # What the operator leaves in its running statistics at a momentum of 1 are the batch's own.
    mean, variance = torch.zeros_like(averages[0]), torch.zeros_like(averages[1])
    result = functional.batch_norm(
        input, mean, variance, self.weight, self.bias, True, 1.0, self.eps
    )
    with torch.no_grad():
        count.add_(1)
        weight = 1.0 / count.to(mean.dtype)
        for average, new in ((averages[0], mean), (averages[1], variance)):
            average.copy_(new * weight + average * (1.0 - weight))
    return result
