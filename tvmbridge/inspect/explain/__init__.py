"""Explanation: what would become of a module, told before anything is compiled."""

from tvmbridge.inspect.explain.explanation import explain
from tvmbridge.inspect.explain.report import Draw, ExplainReport, Mutation, OperatorUse

__all__ = ["Draw", "ExplainReport", "Mutation", "OperatorUse", "explain"]
