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
    "regions": ("whole", "repeated"),
}
_SWITCHES = (
    "measure_kernels",
    "cuda_graphs",
    "tuning_records",
    "cache",
    "freeze",
    "only_if_faster",
    "recall",
    "compiler_collectives",
)


@dataclass(frozen=True)
class CompileOptions:
    """How a module is compiled.

    Args:
        joint: the source of the joint function of training. ``"relax"`` differentiates with TVM's
            Gradient; ``"aot"`` uses PyTorch's own derivative formulas. ``"auto"`` chooses
            ``relax`` if every operator has an admitted gradient rule, and ``aot`` otherwise.
        residual_policy: which values forward keeps for backward. ``"save_all"`` keeps every
            forward value that backward reads. ``"recompute_cheap"`` recomputes element-wise values
            whose operands are kept anyway. ``"min_cut"`` keeps the fewest bytes from which backward
            can recompute the rest without products, convolutions, long reductions or PyTorch's
            kernels. ``"keep_operands"`` is ``min_cut``, but also keeps what such operators read in
            backward. ``"keep_casts"`` is ``min_cut``, but casts weights and inputs that products
            read in half precision only once. ``"auto"`` is ``keep_casts`` on the CPU and
            ``keep_operands`` on a GPU.
        recompute: further operators that the minimum cuts may recompute, by their names in Relax
            (``"relax.nn.softmax"``) or, for ATen calls, in PyTorch (``"aten.avg_pool2d.default"``).
        memory_budget: the fraction, above 0 and at most 1, of the bytes that ``"save_all"`` keeps
            that residuals may take. If the policy's choice takes more, backward also recomputes
            products, convolutions and whatever else gives the same result twice, where that saves
            the most bytes for its estimated time. Random draws are never repeated. None: no limit.
            With a budget calls are not timed beside the module's own forward.
        max_specializations: how many input signatures one module keeps compiled. It also limits,
            for each signature and mode, the different sets of tensors that require a gradient.
            Calls compile no more than that. If ``add_tvm_dispatch`` adds one more, the least
            recently used is dropped, and calls do not compile it again. Without sample inputs,
            calls compile up to this number of signatures, but at most four.
        measure_kernels: choose the kernel of each product and convolution, and the layout of
            images, by measuring the candidates at compilation, once for each shape on a machine.
        combine_matmuls: whether products with a common left operand, such as query, key and value,
            become one product. Their weights are then moved to be adjacent in memory. ``"auto"``
            combines products in inference, and in training if the combined product was measured to
            be faster; ``"always"`` in both; ``"never"`` does not move weights.
        freeze: treat the weights as constants in evaluation mode (see ``add_tvm_dispatch``).
        cuda_graphs: on a GPU, record the launches of a call once and replay them, if that is safe
            (docs/gpu.md). None: True, but False in exported code, where it is not known whether
            other threads use the GPU (docs/export.md).
        gradient_parts: the number of parts that backward runs in. Gradients of the last layers are
            handed out after the first part, so that hooks and DistributedDataParallel can use them
            meanwhile (docs/data_parallel.md). None: one part, but several under
            DistributedDataParallel if the gradients are large.
        tuning_records: apply tuning records, if there are any for the target (docs/tuning.md).
        tuning_logs: an existing directory of tuning records, which is searched before the others;
            kernels without a record are added to its pending list. The environment variable
            ``TVMBRIDGE_TUNING_LOGS`` does the same. With neither, only the records that are part of
            tvmbridge are read, nothing is written, and the working directory is not searched.
        cache: read compiled code from the cache on disk, and write it there. ``TVMBRIDGE_CACHE=0``
            turns the cache off too; ``TVMBRIDGE_CACHE_DIR`` sets its folder.
        extra_passes: your own passes (``RelaxPass``), run in order after the graph passes of the
            pipeline. In inference they run on the forward function, in training on the joint
            function before it is split. A pass must not change a function's parameters or results.
        fx_passes: passes over PyTorch's graph (``FxPass``), run in order on the captured program
            before it is decomposed. :func:`tvmbridge.optimize_fx` runs such passes for eager
            PyTorch. None: ``HorizontalFusion`` of eight chains and more, if it pays.
        background: what a call does if its code is not compiled yet. False: the call waits. True:
            the module's own forward serves the call while another process compiles, and the first
            call after that runs the compiled code. A number: the call first waits for at most that
            many seconds. If background compilation is impossible (docs/limits.md), the call waits.
        only_if_faster: serve some of the first calls by the module's own forward, time both, and
            let the faster one serve all later calls (docs/when_it_pays.md). False: compiled code
            serves every call that it can. ``TVMBRIDGE_ONLY_IF_FASTER``, if set when a module is
            dispatched, overrides the option.
        regions: what becomes one compiled function. ``"whole"``: the module. ``"repeated"``: each
            of its repeated blocks, such as the layers of a transformer, at its first call; equal
            blocks are compiled once, and PyTorch runs what is around them (docs/regions.md).
        compiler_collectives: whether the ranks of the default process group compile together. Rank
            0 measures and compiles, the others receive choices and code, and all run the module's
            own forward if one rank is refused. All ranks must reach the same compilations, as with
            PyTorch's setting ``enable_compiler_collectives`` (docs/data_parallel.md). Calls are
            then not timed beside the module's own forward. False: each rank decides for itself,
            and no message is sent.
        recall: serve a module that an earlier process has captured from disk, without capture
            (docs/caching.md). False: each process captures. ``TVMBRIDGE_RECALL``, if set, overrides
            the option.
        check: which calls of each specialisation and mode are compared with the module's own
            forward, in outputs, state and gradients: ``"never"``; ``"first"``; ``"growing"``, calls
            1, 2, 4, 8 and so on; ``"every:N"``, each N-th call; ``"always"``. A difference that
            rounding does not explain raises NumericsError. ``TVMBRIDGE_CHECK``, if set when a
            module is dispatched, overrides the option; there 1 is ``growing`` and 0 is ``never``.

    Raises:
        ValueError: a field has a value that is not among its choices.
        TypeError: ``extra_passes`` or ``fx_passes`` is not a tuple of passes, ``tuning_logs`` is
            not a path, or a switch is neither True nor False.
    """

    joint: str = "auto"
    residual_policy: str = "auto"
    recompute: tuple[str, ...] = ()
    memory_budget: float | None = None
    max_specializations: int = 16
    measure_kernels: bool = True
    combine_matmuls: str = "auto"
    cuda_graphs: bool | None = None
    gradient_parts: int | None = None
    tuning_records: bool = True
    tuning_logs: str | None = None
    cache: bool = True
    extra_passes: tuple[Any, ...] = ()
    fx_passes: tuple[Any, ...] | None = None
    check: str = "never"
    freeze: bool = False
    background: bool | float = False
    only_if_faster: bool = True
    recall: bool = True
    compiler_collectives: bool = False
    regions: str = "whole"

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(
                    f"CompileOptions.{name} is {value!r}; choose one of {', '.join(choices)}"
                )
        for name in _SWITCHES:
            value = getattr(self, name)
            if not isinstance(value, bool) and not (value is None and name == "cuda_graphs"):
                raise TypeError(f"CompileOptions.{name} is {value!r}; give True or False")
        try:
            CheckPolicy(self.check)
        except ValueError as error:
            raise ValueError(f"CompileOptions.check: {error}") from None
        _check_recompute(self.recompute)
        _check_memory_budget(self.memory_budget)
        _check_extra_passes(self.extra_passes)
        if not isinstance(self.fx_passes, tuple | None):
            raise TypeError(f"CompileOptions.fx_passes is {self.fx_passes!r}; give a tuple")
        check_fx_passes(self.fx_passes or (), "CompileOptions.fx_passes")
        if self.gradient_parts is not None and self.gradient_parts < 1:
            raise ValueError("CompileOptions.gradient_parts must be at least 1, or None")
        if self.max_specializations < 1:
            raise ValueError("CompileOptions.max_specializations must be at least 1")
        if not isinstance(self.background, bool | int | float) or not self.background >= 0:
            raise ValueError(
                f"CompileOptions.background is {self.background!r}; give True, False or seconds"
            )
        if self.compiler_collectives and self.budget is not None:
            raise ValueError(
                "CompileOptions.compiler_collectives needs background=False: ranks wait for each "
                "other's code"
            )
        _check_regions(self)
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
        """The seconds that a call waits for its code to be compiled; None: until it is."""
        if isinstance(self.background, bool):
            return 0.0 if self.background else None
        return float(self.background)

    @classmethod
    def of(cls, options: CompileOptions | dict[str, Any] | None) -> CompileOptions:
        """Return ``options`` itself, or options from a dict of fields, or the defaults for None.

        Raises:
            TypeError: ``options`` is of another type, or a dict with an unknown field.
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


def _check_regions(options: CompileOptions) -> None:
    if options.regions == "whole":
        return
    for name in ("freeze", "compiler_collectives"):
        if getattr(options, name):
            raise ValueError(f'CompileOptions.{name} needs regions="whole"')
    if options.budget is not None:
        raise ValueError('CompileOptions.background needs regions="whole": calls wait for blocks')


def _check_recompute(names: Any) -> None:
    if isinstance(names, tuple) and all(isinstance(n, str) and "." in n for n in names):
        return
    raise ValueError(
        f"CompileOptions.recompute is {names!r}; give a tuple of operator names such as "
        "'relax.nn.conv2d' or 'aten.avg_pool2d.default'"
    )


def _check_memory_budget(budget: Any) -> None:
    if budget is None:
        return
    number = isinstance(budget, int | float) and not isinstance(budget, bool)
    if not number or not 0 < budget <= 1:
        raise ValueError(
            f"CompileOptions.memory_budget is {budget!r}; give a fraction above 0 and at most 1, "
            "or None for no limit"
        )


def _check_extra_passes(passes: Any) -> None:
    if not isinstance(passes, tuple):
        raise TypeError(
            f"CompileOptions.extra_passes is {passes!r}; give a tuple of passes such as (MyPass(),)"
        )
    for pass_ in passes:
        # Checked by its method: this package cannot import the classes of passes.
        if isinstance(pass_, type) or not callable(getattr(pass_, "apply", None)):
            raise TypeError(
                f"CompileOptions.extra_passes holds {pass_!r}, which is no pass; give instances of "
                "subclasses of tvmbridge.passes.base.RelaxPass"
            )


def check_fx_passes(passes: tuple[Any, ...], whose: str) -> None:
    """Raise TypeError if ``passes`` contains anything but FX passes; ``whose`` names the caller."""
    for pass_ in passes:
        if isinstance(pass_, type) or not callable(getattr(pass_, "rewrite", None)):
            raise TypeError(
                f"{whose} got {pass_!r}, which is no pass; give instances of subclasses of "
                "tvmbridge.passes.fx.base.FxPass"
            )
