"""Tuning records: stored in folders, looked up and applied by compilation."""

from tvmbridge.records.apply import Applied, Coverage, apply_records, coverage_of
from tvmbridge.records.folder import Folder
from tvmbridge.records.library import Library
from tvmbridge.records.tasks import Task, count_tasks

__all__ = [
    "Applied",
    "Coverage",
    "Folder",
    "Library",
    "Task",
    "apply_records",
    "count_tasks",
    "coverage_of",
]
