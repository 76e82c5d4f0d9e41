"""Tools to look at what the toolkit made of a module."""

from tvmbridge.inspect.compare import ComparisonReport, Departure, compare
from tvmbridge.inspect.explain import ExplainReport, explain
from tvmbridge.inspect.visualize import visualize

__all__ = ["ComparisonReport", "Departure", "ExplainReport", "compare", "explain", "visualize"]
