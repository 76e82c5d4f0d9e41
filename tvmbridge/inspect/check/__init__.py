"""Checked calls: compare compiled code with the module's own forward during a call."""

from tvmbridge.inspect.check.checker import Checker

__all__ = ["Checker"]
