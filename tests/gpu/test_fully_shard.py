"""Blocks under ``fully_shard`` train as in eager PyTorch on GPUs, with a process for each."""

from __future__ import annotations

import torch

from tests.distributed.sharded_scripts import Setting
from tests.distributed.test_fully_shard import ALL, check
from tests.gpu.helpers import GPU

pytestmark = GPU

_PRECISE = {name: setting for name, setting in ALL.items() if setting.dtype is torch.float64}


def test_steps_are_those_of_eager() -> None:
    check(_PRECISE, max(1, min(2, torch.cuda.device_count())), "cuda")


def test_steps_in_bfloat16_are_those_of_eager() -> None:
    half = {"bfloat16": Setting(mixed=True, dtype=torch.float32)}
    check(half, max(1, min(2, torch.cuda.device_count())), "cuda")
