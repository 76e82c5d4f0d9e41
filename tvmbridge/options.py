"""Options of a compilation; frozen, so that they can be part of a cache key."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import Any

_CHOICES: dict[str, tuple[str, ...]] = {
    "joint": ("auto", "relax", "aot"),
    "residual_policy": ("save_all",),
}


@dataclass(frozen=True)
class CompileOptions:
    """How a module is compiled.

    Args:
        joint: where the joint function of training comes from. ``"relax"`` differentiates with
            TVM's Gradient, ``"aot"`` takes PyTorch's own derivative formulas, ``"auto"`` takes
            ``relax`` when every operator has an admitted gradient rule and ``aot`` otherwise.
        residual_policy: which values forward keeps for backward. ``"save_all"`` keeps every
            forward value that backward reads.
        max_specializations: how many input signatures one module keeps compiled; further ones
            go to the module's own forward.
        measure_kernels: choose between PyTorch's libraries for each matrix product by measuring
            both at compilation, once for each shape in a process.
        tuning_records: apply tuning records, where there are any for the target (docs/tuning.md).
        tuning_logs: a directory of tuning records, looked into before the others; kernels without
            a record are noted in its pending list. The variable ``TVMBRIDGE_TUNING_LOGS`` does the
            same; None and no variable: records are only read, from ``tuning_logs`` in the working
            directory and from those that came with tvmbridge.

    Raises:
        ValueError: a field has a value that is not among its choices.
        TypeError: ``tuning_logs`` is not a path.
    """

    joint: str = "auto"
    residual_policy: str = "save_all"
    max_specializations: int = 16
    measure_kernels: bool = True
    tuning_records: bool = True
    tuning_logs: str | None = None

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(
                    f"CompileOptions.{name} is {value!r}; choose one of {', '.join(choices)}"
                )
        if self.max_specializations < 1:
            raise ValueError("CompileOptions.max_specializations must be at least 1")
        if self.tuning_logs is not None:
            if not isinstance(self.tuning_logs, str | os.PathLike):
                raise TypeError(
                    "CompileOptions.tuning_logs must be the path of a directory, not "
                    f"{type(self.tuning_logs).__name__}; to use no records, set "
                    "tuning_records=False"
                )
            object.__setattr__(self, "tuning_logs", os.fspath(self.tuning_logs))

    @classmethod
    def of(cls, options: CompileOptions | dict[str, Any] | None) -> CompileOptions:
        """``options`` as given, from a dict of fields, or the defaults for None.

        Raises:
            TypeError: not a CompileOptions, a dict or None, or a dict with an unknown field.
        """
        if options is None:
            return cls()
        if isinstance(options, cls):
            return options
        if not isinstance(options, dict):
            raise TypeError(
                f"options must be a CompileOptions, a dict or None, not {type(options).__name__}"
            )
        unknown = set(options) - {f.name for f in fields(cls)}
        if unknown:
            known = ", ".join(f.name for f in fields(cls))
            raise TypeError(f"unknown compile options {sorted(unknown)}; known are {known}")
        return cls(**options)
