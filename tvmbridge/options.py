"""Options of a compilation; frozen, so that they can be part of a cache key."""

from __future__ import annotations

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
        max_specializations: how many input signatures one module keeps compiled; when there are
            more, the one that was not used for longest is dropped.
        measure_kernels: choose between PyTorch's libraries for each matrix product by measuring
            both at compilation, once for each shape in a process.

    Raises:
        ValueError: a field has a value that is not among its choices.
    """

    joint: str = "auto"
    residual_policy: str = "save_all"
    max_specializations: int = 16
    measure_kernels: bool = True

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(
                    f"CompileOptions.{name} is {value!r}; choose one of {', '.join(choices)}"
                )
        if self.max_specializations < 1:
            raise ValueError("CompileOptions.max_specializations must be at least 1")

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
