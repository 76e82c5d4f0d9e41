"""The public functions that install, remove and report the dispatcher of a module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from torch import nn

from tvmbridge.backends import known_target
from tvmbridge.calls.plain import distributed_in
from tvmbridge.calls.standins import wrapped_dispatcher
from tvmbridge.calls.surroundings import refused_now
from tvmbridge.core.checks import CheckPolicy
from tvmbridge.core.contents import MISSING
from tvmbridge.core.errors import CaptureError, DataDependentError
from tvmbridge.core.libraries import register_containers
from tvmbridge.core.methods import MethodOf
from tvmbridge.core.options import CompileOptions
from tvmbridge.core.sharding import gathered
from tvmbridge.graph_capture.capture import normalize_sample
from tvmbridge.graph_capture.observe.refusal import refuse_at_sight, refuse_kind
from tvmbridge.inspect.check import Checker
from tvmbridge.report import DispatchReport, report_of_all
from tvmbridge.runtime.any_size import sizes_to_serve
from tvmbridge.runtime.dispatcher import Dispatcher, code_of
from tvmbridge.runtime.fallbacks import ON_FALLBACK
from tvmbridge.runtime.guards.forwards import forward_of_instance
from tvmbridge.runtime.methods import holder_of, install, methods_of, samples_by_method, uninstall
from tvmbridge.runtime.module_code import ModuleCode
from tvmbridge.runtime.parts import ON_BREAK, Cut, ServedParts
from tvmbridge.runtime.regions import (
    WHY,
    Regions,
    blocks_of,
    dispatch_blocks,
    region_of,
    remove_regions,
)
from tvmbridge.runtime.samples import compile_sample


def add_tvm_dispatch(
    module: nn.Module,
    sample_input: Any = MISSING,
    *,
    sample_kwargs: Mapping[str, Any] | None = None,
    target: Any = None,
    options: CompileOptions | dict[str, Any] | None = None,
    on_fallback: Literal["warn", "silent", "raise"] | None = None,
    dynamic_shapes: Any = None,
    freeze: bool | None = None,
    budget: float | None = None,
    on_break: Literal["eager", "forward"] | None = None,
    methods: Sequence[str] | Mapping[str, Any] = ("forward",),
) -> nn.Module:
    """Make ``module`` run, and train, on code compiled by TVM.

    With a sample, the code for the module's current mode is compiled now. Code for the other mode,
    other inputs and other sets of parameters that require a gradient is compiled at the first call
    that needs it. A further call of this function with another sample adds a specialization.
    Without a sample, code is compiled at calls: for the first signature, and for further ones, four
    in all, and then for any size. A Python number that calls change becomes an input. Calls that no
    code serves run the module's own forward, and :func:`dispatch_report` counts them.

    Args:
        module: the module, changed in place: only its ``forward`` is replaced.
        sample_input: a tensor, or a tuple of positional arguments (nested structures allowed).
            Equivalent calls are served as well, such as calls with keyword arguments or defaults.
        sample_kwargs: keyword arguments of forward; they form a sample even without
            ``sample_input``.
        target: a TVM target, its name or its JSON dict; None is this machine's CPU.
        options: a :class:`CompileOptions` or a dict of its fields.
        on_fallback: what happens at a call that no code serves. ``"warn"``, the default, logs a
            warning at the first call of each reason, and a summary when the process ends.
            ``"silent"`` only counts the calls. ``"raise"`` raises FallbackError instead of running
            the module's own forward. None keeps the setting of an earlier dispatch of the module.
        dynamic_shapes: the sizes that code serves. None, the default: the sizes of the samples;
            without a sample the sizes of four signatures, and then any size by symbolic code.
            ``"auto"``: one symbolic code also serves calls that differ from a sample in sizes
            alone. It is compiled at the first such call, and the dimensions that changed, and those
            of the batch, become symbols. Sizes of 0 and 1, and sizes that take another branch in
            forward, run the module's own forward. A spec as for torch.export (a dict by parameter,
            a tuple, a ShapesCollection): dimensions with ``Dim``, ``Dim.AUTO`` or ``Dim.DYNAMIC``
            are symbols from the first call on, and the others are static. No code is compiled for
            the sizes of the sample alone. Calls outside of a Dim's bounds run the module's own
            forward.
        freeze: whether the current parameters and buffers become constants. Values that depend on
            them alone are computed once, batch norm is folded into convolutions, and weights of
            products are packed for the fastest library. The module must be in eval mode on the CPU,
            and calls must not record gradients. After a parameter or buffer is written or replaced,
            calls run the module's own forward until the module is dispatched again. Writes through
            ``.data`` are not detected. None, the default, is False, or the setting of an earlier
            dispatch of the module.
        budget: seconds that this call, and calls that compile, wait for code. Code that is not
            ready by then is compiled further in another process, while the module's own forward
            runs. With 0 no call waits. ``CompileOptions.background`` is the same setting, and its
            documentation says where it works. None, the default: the value of the options, or of an
            earlier dispatch.
        on_break: what happens if one graph cannot contain all of forward, because a size or a
            branch depends on the values of tensors (masks, ``nonzero``, ``item()``). ``"eager"``,
            the default: PyTorch runs that part, and the graphs before and after it are compiled,
            each at its first call and for any size. ``"forward"``: a sample is refused, and calls
            run the module's own forward. None keeps the setting of an earlier dispatch of the
            module.
        methods: the names of the methods to dispatch, such as ``["encode", "decode"]``; each is
            dispatched like forward. A dict gives each method a sample, or None: ``{"encode": x,
            "decode": (z,)}``.

    Returns:
        ``module``. If an error is raised, the module is unchanged. If a compilation fails at a
        call, this call and equal ones run the module's own forward.

    Raises:
        TypeError: ``module`` is no module, or ``options`` has an unknown field.
        ValueError: an argument or ``TVMBRIDGE_CHECK`` has a value that is not allowed. Or the
            module has no method of a name in ``methods``, or a sample is given beside ``methods``.
            Or the spec of sizes has a dimension that the sample does not have. Or ``freeze`` is
            True for a module in train mode, with ``dynamic_shapes``, or if an earlier dispatch did
            not freeze. Or ``budget`` is negative, or is given with ``on_fallback="raise"``.
        torch._dynamo.exc.UserError: torch.export rejects the spec for the sample.
        CaptureError: forward refuses the sample, torch.export cannot capture it, or a mode is
            active in which no module can be traced. Or the module is a wrapper, a ScriptModule, or
            sharded.
        UnsupportedOperatorError: operators cannot be compiled or differentiated; the message names
            all of them.
        BuildError: the target is unknown, or TVM cannot compile for it.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, not {type(module).__name__}")
    if tuple(methods) != ("forward",) or isinstance(methods, Mapping):
        if sample_input is not MISSING or sample_kwargs is not None:
            raise ValueError("give methods their samples in a dict: methods={'encode': (x,)}")
        samples = samples_by_method(methods)
        holders = {n: module if n == "forward" else holder_of(module, n) for n in samples}
        for name, holder in holders.items():
            add_tvm_dispatch(
                holder,
                samples[name],
                target=target,
                options=options,
                on_fallback=on_fallback,
                dynamic_shapes=dynamic_shapes,
                freeze=freeze,
                budget=budget,
                on_break=on_break,
            )
        for holder in holders.values():
            if isinstance(holder, MethodOf):
                install(holder)
        return module
    chosen = CompileOptions.of(options)
    if chosen.regions != "whole" and dynamic_shapes is not None:
        raise ValueError('dynamic_shapes needs regions="whole": blocks have code for their sizes')
    if freeze is not None:
        chosen = replace(chosen, freeze=freeze)
    if budget is not None:
        chosen = replace(chosen, background=float(budget))
    policy = CheckPolicy.of_now(chosen.check)
    if on_fallback not in (None, *ON_FALLBACK):
        raise ValueError(f"on_fallback is {on_fallback!r}; choose one of {', '.join(ON_FALLBACK)}")
    if on_break not in (None, *ON_BREAK):
        raise ValueError(f"on_break is {on_break!r}; choose one of {', '.join(ON_BREAK)}")
    sampled = sample_input is not MISSING or sample_kwargs is not None
    if chosen.budget is not None and on_fallback == "raise":
        raise ValueError("with on_fallback='raise' calls cannot but wait: set background=False")
    given = () if sample_input is MISSING else sample_input
    args, kwargs = normalize_sample(given, sample_kwargs)
    if target is not None:
        known_target(target)
    distributed = distributed_in(module)
    sampled = sampled and distributed is None
    register_containers(module)
    with gathered(module):
        if sampled:
            refuse_at_sight(module, args, kwargs)
        else:  # tensors and hooks may be others at the first call
            refuse_kind(module)
    surroundings = refused_now() if sampled else None
    if surroundings is not None:
        raise CaptureError(f"add_tvm_dispatch cannot trace the module here: {surroundings}")
    installed = module.__dict__.get("forward")
    if chosen.freeze:
        _refuse_to_freeze(module, dynamic_shapes)
    sizes = sizes_to_serve(module, dynamic_shapes, (args, kwargs) if sampled else None)
    dispatcher, code = installed, code_of(installed, ModuleCode)
    if code is not None:
        if freeze not in (None, code.options.freeze):
            raise ValueError(
                f"freeze is {freeze}, and an earlier dispatch of this module has set the contrary: "
                "call remove_tvm_dispatch first"
            )
        if sizes not in (None, "auto", getattr(code.policy.sizes, "spec", None)):
            raise ValueError(
                "an earlier dispatch of this module had another dynamic_shapes: call "
                "remove_tvm_dispatch first"
            )
        code.paths.forget()
        if code.policy.renew_after_fork() and code.policy.cut.of_regions:
            remove_regions(module)
        if budget is not None:
            code.background.budget = chosen.budget
        if on_break is not None and not code.policy.cut.of_regions:
            code.policy.cut = _cut(code, on_break)
    else:
        code = ModuleCode(module, forward_of_instance(module), target, chosen)
        dispatcher = Dispatcher(code)
        regional = chosen.regions == "repeated" and bool(blocks_of(module))
        code.policy.cut = (_regional_cut if regional else _cut)(code, on_break or "eager")
        if sizes is not None:
            code.policy.serve_any_size(None if sizes == "auto" else sizes)
        if policy.word != "never":
            code.checker = Checker(policy, chosen)
    if code.policy.cut.of_regions:
        code.policy.cut.begin(code)
        dispatch_blocks(code.policy.cut)
    elif distributed is not None:
        if not code.policy.cut.at(str(distributed)):
            raise CaptureError(f"{type(module).__name__} cannot be captured: {distributed}")
        code.policy.compiles_signatures = True
    elif sampled:
        try:
            with gathered(module):
                compile_sample(code.policy, args, kwargs)
        except DataDependentError as error:
            if not code.policy.cut.at(str(error)):
                raise
    elif code.policy.sizes is None or code.policy.sizes.spec is None:
        code.policy.compiles_signatures = True
    if on_fallback is not None:
        code.tally.on_fallback = on_fallback
    module.__dict__["forward"] = dispatcher
    return module


def _regional_cut(code: ModuleCode, on_break: str) -> Cut:
    """Return the decision to dispatch the repeated blocks of a module in its place."""
    cut = Cut(_regions_made(code, on_break), of_regions=True)
    cut.why = WHY
    return cut


def _regions_made(code: ModuleCode, on_break: str) -> Callable[[ModuleCode], ServedParts]:
    """Return the function that dispatches the repeated blocks of a module in its place."""
    policy = CheckPolicy.of_now(code.options.check)

    def checker() -> Checker | None:
        return None if policy.word == "never" else Checker(policy, code.options)

    def make(of: ModuleCode) -> ServedParts:
        return Regions(of, lambda block: _cut(block, on_break), checker)

    return make


def _cut(code: ModuleCode, on_break: str) -> Cut:
    if on_break == "forward" or code.options.freeze:
        return Cut()

    def make(of: ModuleCode) -> ServedParts:
        # Imported only for a module in parts, because importing TorchDynamo takes a second.
        from tvmbridge.dynamo.parts import ModuleInParts

        return ModuleInParts(of)

    make_regions = _regions_made(code, on_break) if _may_have_regions(code) else None
    return Cut(make, make_regions=make_regions)


def _may_have_regions(code: ModuleCode) -> bool:
    """Whether the module has repeated blocks that may be dispatched in its place."""
    try:
        replace(code.options, regions="repeated")
    except ValueError:
        return False
    is_part = isinstance(code.module, MethodOf) or region_of(code.module) is not None
    return not is_part and bool(blocks_of(code.module))


def _refuse_to_freeze(module: nn.Module, dynamic_shapes: Any) -> None:
    if module.training:
        raise ValueError("freeze=True is for evaluation: call module.eval() first")
    if dynamic_shapes is not None:
        raise ValueError("freeze=True compiles for the sizes of samples alone, not dynamic_shapes")


def _code_of(module: nn.Module) -> ModuleCode:
    forward = module.__dict__.get("forward") if isinstance(module, nn.Module) else None
    code = code_of(wrapped_dispatcher(forward), ModuleCode)
    if code is None:
        raise ValueError(
            f"this {type(module).__name__} is not dispatched; call add_tvm_dispatch first"
        )
    return code


def codes_of(module: nn.Module) -> dict[str, ModuleCode]:
    """Return the compiled code of a module's forward and methods, by name.

    Raises:
        ValueError: the module is not dispatched.
    """
    methods = methods_of(module) if isinstance(module, nn.Module) else {}
    found = {name: _code_of(method.holder) for name, method in methods.items()}
    if found and wrapped_dispatcher(module.__dict__.get("forward")) is None:
        return found
    return {"forward": _code_of(module), **found}


def remove_tvm_dispatch(module: nn.Module) -> nn.Module:
    """Restore the forward and the methods that ``module`` had before dispatch.

    Raises:
        ValueError: the module is not dispatched, or its forward has been wrapped since then.
    """
    methods = methods_of(module)
    for name, method in methods.items():
        _code_of(method.holder).background.cancel()
        uninstall(module, name)
    if methods and wrapped_dispatcher(module.__dict__.get("forward")) is None:
        return module
    code = _code_of(module)
    if code_of(module.__dict__["forward"], ModuleCode) is None:
        raise ValueError(
            f"the forward of this {type(module).__name__} was wrapped after it was dispatched "
            "(by accelerate's prepare, say): unwrap it first"
        )
    code.background.cancel()
    if code.policy.cut.of_regions:
        remove_regions(module)
    if code.own is None:
        del module.__dict__["forward"]
    else:
        module.__dict__["forward"] = code.own
    return module


def wait(module: nn.Module, timeout: float | None = None) -> None:
    """Wait until no code of ``module`` is being compiled in the background.

    The next call uses the new code. Code that calls request while other code is compiled is not
    waited for; its compilation begins at a later call.

    Args:
        module: a dispatched module.
        timeout: seconds; None: no limit.

    Raises:
        TimeoutError: the compilation has not ended by then; it continues.
        ValueError: the module is not dispatched.
    """
    for code in codes_of(module).values():
        code.background.wait(timeout)


def dispatch_report(module: nn.Module) -> DispatchReport:
    """Return a report of the code that ``module`` has compiled, and of the calls so far.

    Raises:
        ValueError: the module is not dispatched.
    """
    return report_of_all(codes_of(module))
