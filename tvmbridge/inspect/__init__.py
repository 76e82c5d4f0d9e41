"""Tools that inspect a module's compilation: drawings, explanations, comparisons, checked calls."""

from tvmbridge.inspect.compare import ComparisonReport, Departure, compare
from tvmbridge.inspect.explain import ExplainReport, explain
from tvmbridge.inspect.visualize import visualize

__all__ = ["ComparisonReport", "Departure", "ExplainReport", "compare", "explain", "visualize"]
