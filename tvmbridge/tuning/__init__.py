"""Search for faster schedules, with the results kept in folders of records."""

from tvmbridge.tuning.api import TuningReport, tune, tune_pending

__all__ = ["TuningReport", "tune", "tune_pending"]
