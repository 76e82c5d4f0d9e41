"""Explain how a module would be compiled, without compiling it."""

from tvmbridge.inspect.explain.explanation import explain
from tvmbridge.inspect.explain.report import Draw, ExplainReport, Mutation, OperatorUse

__all__ = ["Draw", "ExplainReport", "Mutation", "OperatorUse", "explain"]
