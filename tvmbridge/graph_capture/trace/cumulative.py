"""Batch norm with a cumulative average, made traceable.

With ``momentum=None`` a batch norm reads the number of batches from its buffer, as a Python number,
to weigh the new statistics. A trace cannot have that number: it would be frozen. Within
:func:`cumulative_averages_on_tensors` the weight stays a tensor.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tvmbridge.core.torch_private import BatchNorm
from tvmbridge.graph_capture.trace.patches import forward_patched_here


def cumulative_averages_on_tensors(module: nn.Module) -> AbstractContextManager[None]:
    """Within it batch norms with ``momentum=None`` compute with tensors alone in train mode.

    Args:
        module: what is traced; a forward that its batch norms hold themselves is replaced too.
    """
    return forward_patched_here(module, BatchNorm, _forward_on_tensors)


def _forward_on_tensors(genuine: Any, self: BatchNorm, input: torch.Tensor) -> Any:
    count, averages = self.num_batches_tracked, (self.running_mean, self.running_var)
    if self.momentum is not None or not self.training or not self.track_running_stats:
        return genuine(self, input)
    if count is None or averages[0] is None or averages[1] is None:
        return genuine(self, input)
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
