"""Every private name of PyTorch that tvmbridge uses, with its purpose and a check of its behavior.

The doctor loads this package by its path, even if PyTorch lacks one of the names. The package
therefore imports nothing of tvmbridge, and imports its own modules relatively.
"""

from __future__ import annotations

from .attributes import ATTRIBUTES
from .checks import PrivateName, problem
from .dynamo import DYNAMO
from .gpu import GPU
from .guards import GUARDS
from .imported import IMPORTED
from .modes import MODES
from .replaced import REPLACED
from .transforms import TRANSFORMS

__all__ = [
    "ATTRIBUTES",
    "DYNAMO",
    "GPU",
    "GUARDS",
    "IMPORTED",
    "MODES",
    "REPLACED",
    "TABLE",
    "TRANSFORMS",
    "PrivateName",
    "problem",
]

TABLE: tuple[PrivateName, ...] = (
    *IMPORTED,
    *DYNAMO,
    *GUARDS,
    *MODES,
    *ATTRIBUTES,
    *REPLACED,
    *TRANSFORMS,
    *GPU,
)


def problems() -> list[str]:
    """Return a sentence for each private name that is missing or behaves unexpectedly."""
    return [found for name in TABLE if (found := problem(name)) is not None]
