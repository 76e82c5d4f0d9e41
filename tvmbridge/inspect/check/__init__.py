"""Checked calls: what compiled code made of a call beside what the module's own forward makes."""

from tvmbridge.inspect.check.checker import Checker

__all__ = ["Checker"]
