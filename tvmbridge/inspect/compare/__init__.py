"""Numerical comparison: which stage departs from eager PyTorch, at which operator, and why."""

from tvmbridge.inspect.compare.comparison import STAGES
from tvmbridge.inspect.compare.report import ComparisonReport, Departure, Figure
from tvmbridge.inspect.compare.run import compare

__all__ = ["STAGES", "ComparisonReport", "Departure", "Figure", "compare"]
