"""Costs: what a launch and a copied byte take, by which fusion is weighed against copies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch


@dataclass(frozen=True)
class Costs:
    """Seconds that eager PyTorch takes for one more operator, and bytes that it copies a second."""

    launch: float
    bytes_per_second: float

    @classmethod
    def of(cls, device: torch.device) -> Costs:
        """Those of a type of device (``benchmarks/recommender.py`` measures them)."""
        return BY_DEVICE.get(device.type, BY_DEVICE["cpu"])

    def gain(self, launches: int, copied: int) -> float:
        """Seconds saved by ``launches`` operators less and ``copied`` bytes more."""
        return launches * self.launch - copied / self.bytes_per_second


BY_DEVICE: Mapping[str, Costs] = MappingProxyType(
    {"cpu": Costs(3e-6, 5e9), "cuda": Costs(5e-6, 1e12)}
)
