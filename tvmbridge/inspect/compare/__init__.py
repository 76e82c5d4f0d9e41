"""Numerical comparison: which stage departs from eager PyTorch, at which operator, and why."""

from tvmbridge.inspect.compare.comparison import STAGES, compare
from tvmbridge.inspect.compare.report import ComparisonReport, Departure, Figure

__all__ = ["STAGES", "ComparisonReport", "Departure", "Figure", "compare"]
