"""Every private name of PyTorch that is used, what for, and what is relied on, as data.

The doctor loads this package by its path, also where PyTorch lacks one of the names: so it imports
nothing of tvmbridge, and its own modules relatively.
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
    """What this PyTorch lacks, or does otherwise than is relied on, a sentence each."""
    return [found for name in TABLE if (found := problem(name)) is not None]
