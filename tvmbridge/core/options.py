"""Options of a compilation; frozen, so that they can be part of a cache key."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import Any

from tvmbridge.core.checks import CheckPolicy

_CHOICES: dict[str, tuple[str, ...]] = {
    "joint": ("auto", "relax", "aot"),
    "residual_policy": (
        "auto",
        "save_all",
        "recompute_cheap",
        "min_cut",
        "keep_casts",
        "keep_operands",
    ),
    "combine_matmuls": ("auto", "always", "never"),
}
_SWITCHES = (
    "measure_kernels",
    "cuda_graphs",
    "tuning_records",
    "cache",
    "freeze",
    "only_if_faster",
)


@dataclass(frozen=True)
class CompileOptions:
    """How a module is compiled.

    Args:
        joint: where the joint function of training comes from. ``"relax"`` differentiates with
            TVM's Gradient, ``"aot"`` takes PyTorch's own derivative formulas, ``"auto"`` takes
            ``relax`` when every operator has an admitted gradient rule and ``aot`` otherwise.
        residual_policy: which values forward keeps for backward. ``"save_all"`` keeps every
            forward value that backward reads, ``"recompute_cheap"`` computes element-wise ones
            again where their operands are kept anyway, ``"min_cut"`` keeps the fewest bytes from
            which the rest can be computed again without products, convolutions, long reductions
            or PyTorch's kernels, ``"keep_operands"`` does so but for what these read in backward.
            ``"keep_casts"`` is ``min_cut`` but for weights and inputs in a half precision that
            products read, which are cast once. ``"auto"`` is ``keep_casts`` on the CPU and
            ``keep_operands`` on a GPU.
        recompute: operators that minimum cuts may compute again all the same, by their names in
            Relax (``"relax.nn.softmax"``) or, for ATen calls, in PyTorch
            (``"aten.avg_pool2d.default"``).
        max_specializations: how many input signatures one module keeps compiled, and of each, in
            each mode, how many choices of the tensors that require a gradient. Calls compile no
            further choices; where ``add_tvm_dispatch`` adds one, or a signature, what was not used
            for longest is dropped, and calls do not compile it again. Where no sample was given,
            calls compile up to so many signatures, but no more than four.
        measure_kernels: choose between PyTorch's libraries for each matrix product by measuring
            both at compilation, once for each shape in a process.
        combine_matmuls: whether products with a common left operand, such as query, key and value,
            become one product, whose weights are then moved to lie side by side in memory.
            ``"auto"`` does so in inference, and in training where the combined products were
            measured to be faster; ``"always"`` in both; ``"never"`` leaves the weights where they
            are.
        freeze: take the weights for constants, in evaluation (see ``add_tvm_dispatch``).
        cuda_graphs: on a GPU, record the launches of a call once and replay them, where that is
            safe (docs/gpu.md).
        tuning_records: apply tuning records, where there are any for the target (docs/tuning.md).
        tuning_logs: an existing directory of tuning records, looked into before the others; kernels
            without a record are noted in its pending list. The variable ``TVMBRIDGE_TUNING_LOGS``
            does the same; None and no variable: records are only read, from those that came with
            tvmbridge, never from the working directory.
        cache: read compiled code from the cache on disk, and keep it there (``TVMBRIDGE_CACHE=0``
            turns that off as well, ``TVMBRIDGE_CACHE_DIR`` says where it is).
        extra_passes: passes of your own (``RelaxPass``), run in order behind the graph passes of
            the pipeline: on the forward function in inference, on the joint function, before it is
            split, in training. They may not change what a function takes and returns.
        fx_passes: passes over PyTorch's graph (``FxPass``), run in order on the program that was
            captured, before it is decomposed: :func:`tvmbridge.optimize_fx` has them in eager
            PyTorch. None: ``HorizontalFusion`` of eight chains and more, where it pays.
        background: what a call does for which code has to be compiled. False waits for it; True
            runs the module's own forward, while another process compiles, and the next call after
            that is served; a number waits for so many seconds. Where that cannot be
            (docs/limits.md) the call waits.
        only_if_faster: time the first calls of compiled code beside the module's own forward, which
            serves some of them, and have the faster one serve from then on (docs/when_it_pays.md).
            ``TVMBRIDGE_ONLY_IF_FASTER``, where it is set when a module is dispatched, wins. False:
            compiled code serves whatever it can.
        check: which calls of each specialisation and mode are checked against the module's own
            forward, outputs, state and gradients: ``"never"``; ``"first"``; ``"growing"``, calls
            1, 2, 4, 8 and so on; ``"every:N"``, each N-th call; ``"always"``. A difference that
            rounding does not explain raises NumericsError. ``TVMBRIDGE_CHECK``, where it is set
            when a module is dispatched, wins; there 1 is ``growing`` and 0 ``never``.

    Raises:
        ValueError: a field has a value that is not among its choices.
        TypeError: ``extra_passes`` or ``fx_passes`` is not a tuple of passes, ``tuning_logs`` no
            path, or a switch neither True nor False.
    """

    joint: str = "auto"
    residual_policy: str = "auto"
    recompute: tuple[str, ...] = ()
    max_specializations: int = 16
    measure_kernels: bool = True
    combine_matmuls: str = "auto"
    cuda_graphs: bool = True
    tuning_records: bool = True
    tuning_logs: str | None = None
    cache: bool = True
    extra_passes: tuple[Any, ...] = ()
    fx_passes: tuple[Any, ...] | None = None
    check: str = "never"
    freeze: bool = False
    background: bool | float = False
    only_if_faster: bool = True

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(
                    f"CompileOptions.{name} is {value!r}; choose one of {', '.join(choices)}"
                )
        for name in _SWITCHES:
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise TypeError(f"CompileOptions.{name} is {value!r}; give True or False")
        try:
            CheckPolicy(self.check)
        except ValueError as error:
            raise ValueError(f"CompileOptions.check: {error}") from None
        _check_recompute(self.recompute)
        _check_extra_passes(self.extra_passes)
        if not isinstance(self.fx_passes, tuple | None):
            raise TypeError(f"CompileOptions.fx_passes is {self.fx_passes!r}; give a tuple")
        check_fx_passes(self.fx_passes or (), "CompileOptions.fx_passes")
        if self.max_specializations < 1:
            raise ValueError("CompileOptions.max_specializations must be at least 1")
        if not isinstance(self.background, bool | int | float) or not self.background >= 0:
            raise ValueError(
                f"CompileOptions.background is {self.background!r}; give True, False or seconds"
            )
        if self.tuning_logs is not None:
            if not isinstance(self.tuning_logs, str | os.PathLike):
                raise TypeError(
                    "CompileOptions.tuning_logs must be the path of a directory, not "
                    f"{type(self.tuning_logs).__name__}; to use no records, set "
                    "tuning_records=False"
                )
            object.__setattr__(self, "tuning_logs", os.fspath(self.tuning_logs))

    @property
    def budget(self) -> float | None:
        """The seconds that a call waits for its code; None: as long as it takes."""
        if isinstance(self.background, bool):
            return 0.0 if self.background else None
        return float(self.background)

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


def _check_recompute(names: Any) -> None:
    if isinstance(names, tuple) and all(isinstance(n, str) and "." in n for n in names):
        return
    raise ValueError(
        f"CompileOptions.recompute is {names!r}; give a tuple of operator names such as "
        "'relax.nn.conv2d' or 'aten.avg_pool2d.default'"
    )


def _check_extra_passes(passes: Any) -> None:
    if not isinstance(passes, tuple):
        raise TypeError(
            f"CompileOptions.extra_passes is {passes!r}; give a tuple of passes such as (MyPass(),)"
        )
    for pass_ in passes:
        # By what it can do: options stand below the passes and do not import them.
        if isinstance(pass_, type) or not callable(getattr(pass_, "apply", None)):
            raise TypeError(
                f"CompileOptions.extra_passes holds {pass_!r}, which is no pass; give instances of "
                "subclasses of tvmbridge.passes.base.RelaxPass"
            )


def check_fx_passes(passes: tuple[Any, ...], whose: str) -> None:
    """Raise TypeError where ``passes``, given to ``whose``, holds what is no fx pass."""
    for pass_ in passes:
        if isinstance(pass_, type) or not callable(getattr(pass_, "rewrite", None)):
            raise TypeError(
                f"{whose} got {pass_!r}, which is no pass; give instances of subclasses of "
                "tvmbridge.passes.fx.base.FxPass"
            )
