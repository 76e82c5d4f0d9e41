"""The device of the suites that have their own commands, read from an environment variable."""

from __future__ import annotations

import os

import torch

VARIABLE = "TVMBRIDGE_TEST_DEVICE"
DEVICE = os.environ.get(VARIABLE, "cpu")


def generators() -> list[torch.Tensor]:
    """Return the states of the PyTorch generators that code on the device may draw from."""
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state()] if DEVICE != "cpu" else states
