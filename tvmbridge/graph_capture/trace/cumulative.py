"""Make batch norm with ``momentum=None`` (a cumulative average) traceable.

PyTorch reads ``num_batches_tracked`` as a Python number to get the weight of the new statistics,
and a trace would specialize on the number. Here the weight stays a tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from tvmbridge.calls.patches import patches
from tvmbridge.core.torch_private import BatchNorm


@patches(BatchNorm, "forward")
def _forward_on_tensors(genuine: Any, self: BatchNorm, input: torch.Tensor) -> Any:
    count, averages = self.num_batches_tracked, (self.running_mean, self.running_var)
    if self.momentum is not None or not self.training or not self.track_running_stats:
        return genuine(self, input)
    if count is None or averages[0] is None or averages[1] is None:
        return genuine(self, input)
    self._check_input_dim(input)
    # With a momentum of 1 the operator writes the batch's own statistics as running statistics.
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
