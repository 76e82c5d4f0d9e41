"""Search for faster schedules, and store the results in folders of tuning records."""

from tvmbridge.tuning.api import TuningReport, tune, tune_pending

__all__ = ["TuningReport", "tune", "tune_pending"]
