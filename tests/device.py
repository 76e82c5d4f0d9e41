"""The device that suites with commands of their own run on, set for their workers."""

from __future__ import annotations

import os

import torch

VARIABLE = "TVMBRIDGE_TEST_DEVICE"
DEVICE = os.environ.get(VARIABLE, "cpu")


def generators() -> list[torch.Tensor]:
    """The states of PyTorch's generators that code on the device may draw from."""
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state()] if DEVICE != "cpu" else states
