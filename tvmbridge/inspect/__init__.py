"""Tools to look at what the toolkit made of a module."""

from tvmbridge.inspect.visualize import visualize

__all__ = ["visualize"]
