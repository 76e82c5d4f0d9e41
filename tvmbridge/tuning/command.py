"""What the command ``tvmbridge tune`` does."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tvmbridge.core.options import CompileOptions
from tvmbridge.graph_capture.capture import normalize_sample
from tvmbridge.records import Folder, Task
from tvmbridge.tuning.api import Limits, TuningReport, tune_pending, tune_tasks
from tvmbridge.tuning.collect import module_tasks
from tvmbridge.tuning.merge import merge, prune
from tvmbridge.tuning.run import Clock

__all__ = ["Limits", "merge", "prune", "run"]


def run(
    samples: Sequence[tuple[Any, Any]], log_dir: Path, target: Any, limits: Limits
) -> TuningReport:
    """Tune the tasks of several modules as one, or the pending list where there are no modules.

    Args:
        samples: modules with their sample inputs.
    """
    if not sys.stderr.isatty():  # there is no bar, so say what happens
        logging.basicConfig(format="%(message)s", stream=sys.stderr)
        logging.getLogger("tvmbridge.tuning").setLevel(logging.INFO)
    if not samples:
        return tune_pending(log_dir, target=target, trials=limits.trials, timeout=limits.timeout)
    clock = Clock(limits.timeout)
    tasks: Counter[Task] = Counter()
    external = 0
    for module, sample in samples:
        args, kwargs = normalize_sample(sample, None)
        options = CompileOptions()
        found, kernels, resolved = module_tasks(
            module, args, kwargs, target=target, options=options
        )
        tasks.update(found)
        external += kernels
    folder = Folder.below(log_dir, resolved)
    outcomes = tune_tasks(folder, tasks, limits.trials, clock)
    return TuningReport(folder.path, tuple(outcomes), external)
