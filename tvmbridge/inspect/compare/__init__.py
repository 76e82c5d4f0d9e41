"""Numerical comparison with eager PyTorch: find the stage and the operator that depart from it."""

from tvmbridge.inspect.compare.comparison import STAGES, compare
from tvmbridge.inspect.compare.report import ComparisonReport, Departure, Figure

__all__ = ["STAGES", "ComparisonReport", "Departure", "Figure", "compare"]
