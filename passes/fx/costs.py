"""The time of a kernel launch and of a copied byte, to decide whether a fusion is worth it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch


@dataclass(frozen=True)
class Costs:
    """The costs of eager PyTorch on a device.

    - ``launch``: seconds that one more operator takes.
    - ``bytes_per_second``: bytes that it copies in a second.
    """

    launch: float
    bytes_per_second: float

    @classmethod
    def of(cls, device: torch.device) -> Costs:
        """Return the costs on a type of device; ``benchmarks/recommender.py`` measures them."""
        return BY_DEVICE.get(device.type, BY_DEVICE["cpu"])

    def gain(self, launches: int, copied: int) -> float:
        """Return the seconds that a fusion saves.

        Args:
            launches: how many fewer operators run.
            copied: how many more bytes are copied.
        """
        return launches * self.launch - copied / self.bytes_per_second


BY_DEVICE: Mapping[str, Costs] = MappingProxyType(
    {"cpu": Costs(3e-6, 5e9), "cuda": Costs(5e-6, 1e12)}
)
