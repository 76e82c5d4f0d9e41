"""Dispatch: the public functions that install, remove and report a module's dispatcher."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from torch import nn

from tvmbridge.backends import known_target
from tvmbridge.core.checks import CheckPolicy
from tvmbridge.core.contents import MISSING
from tvmbridge.core.errors import CaptureError, DataDependentError
from tvmbridge.core.libraries import register_containers
from tvmbridge.core.methods import MethodOf
from tvmbridge.core.options import CompileOptions
from tvmbridge.core.sharding import gathered
from tvmbridge.graph_capture.capture import normalize_sample
from tvmbridge.graph_capture.observe.refusal import refuse_at_sight
from tvmbridge.graph_capture.surroundings import refused_now
from tvmbridge.inspect.check import Checker
from tvmbridge.report import DispatchReport, report_of_all
from tvmbridge.runtime.declared_sizes import DeclaredSizes, sizes_to_serve
from tvmbridge.runtime.dispatcher import Dispatcher
from tvmbridge.runtime.fallbacks import ON_FALLBACK
from tvmbridge.runtime.guards.forwards import standing_behind
from tvmbridge.runtime.methods import holder_of, install, methods_of, samples_by_method, uninstall
from tvmbridge.runtime.parts import ON_BREAK, Cut, ServedParts
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

    With a sample the code is compiled now for the mode that the module is in; the other mode at
    the first call that needs it, and so is code for other inputs and parameters that require a
    gradient. Called again with another sample, it adds a specialisation. Without a sample all is
    compiled at calls: for the first that comes, and for further signatures, up to four of them.
    Calls that no code was made for, or could be made for, go to the module's own forward, and are
    counted in :func:`dispatch_report`.

    Args:
        module: changed in place: its ``forward`` is replaced, nothing else.
        sample_input: a tensor, or a tuple of positional arguments (nested structures allowed).
            Calls that mean the same by forward's parameters and defaults are served as well.
        sample_kwargs: keyword arguments of forward; they make a sample by themselves.
        target: a TVM target, its name or its JSON dict; None is this machine's CPU.
        options: a :class:`CompileOptions` or a dict of its fields.
        on_fallback: what calls do that run the module's own forward. ``"warn"``, the default, logs
            a warning for the first of each reason, and a summary when the process ends;
            ``"silent"`` only counts them; ``"raise"`` raises FallbackError instead of running it.
            None leaves what an earlier dispatch of the module has set.
        dynamic_shapes: ``"auto"``: calls that differ from a sample in sizes alone are served by
            symbolic code, which is compiled once, at the first such call: the dimensions that
            changed become symbols, with the rows of a batch. Sizes of 0 and 1, and those that
            forward treats in another way, run the module's own forward. Or a spec in torch.export's
            words (a dict by parameter, a tuple, a ShapesCollection): the dimensions that it gives a
            ``Dim``, ``Dim.AUTO`` or ``Dim.DYNAMIC`` are symbols from the first call on, nothing is
            compiled for its sizes, and calls outside of a Dim's bounds run the module's own
            forward; the others are static. None, the default: code serves the sizes of samples.
        freeze: the parameters and buffers of now are constants: what depends on them alone is
            computed once, batch norm goes into convolutions, weights of products are packed for
            the fastest library. For modules in eval mode on the CPU, called where autograd records
            nothing. A call after one was written or replaced runs the module's own forward, until
            the module is dispatched again; writes through ``.data`` are not seen. None, the
            default, is False, or what an earlier dispatch of the module has set.
        budget: seconds that this call, and calls that compile, wait for code. What is not ready by
            then goes on in another process, while the module's own forward runs; 0: nothing waits.
            ``CompileOptions.background`` says the same and where it can be. None, the default:
            what the options say, or an earlier dispatch of the module.
        on_break: what happens where a size or a decision depends on the values of tensors (masks,
            ``nonzero``, ``item()``), so that no one graph has all of forward. ``"eager"``, the
            default: PyTorch runs that, and the graphs before and behind it are compiled, each at
            its first call and for any size. ``"forward"``: a sample is refused, and calls run the
            module's own forward. None leaves what an earlier dispatch of the module has set.
        methods: the names of what is dispatched, ``["encode", "decode"]``: each method as forward
            is. A dict gives each a sample, or None: ``{"encode": x, "decode": (z,)}``.

    Returns:
        ``module``. Where an error is raised the module is left as it was; a compilation that fails
        at a call sends that call, and those like it, to the module's own forward.

    Raises:
        TypeError: ``module`` is no module, or ``options`` has an unknown field.
        ValueError: the module has no method of a name in ``methods``, or a sample is given beside
            them; ``TVMBRIDGE_CHECK`` is set to a word that says no calls to check, or
            ``on_fallback`` or ``dynamic_shapes`` is another word; the spec of sizes has one that
            the sample does not have, or a Dim made of another; ``freeze`` is True for a module in
            train mode, with ``dynamic_shapes``, or where an earlier dispatch did not freeze;
            ``budget`` is negative, or given with ``on_fallback="raise"``.
        torch._dynamo.exc.UserError: the spec is not one for the sample; as torch.export says.
        CaptureError: forward refuses the sample, torch.export cannot capture it, or a mode is
            active in which nothing can be traced.
        UnsupportedOperatorError: an operator cannot be compiled or differentiated; all are named.
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
    with gathered(module):
        refuse_at_sight(module, args, kwargs)
    surroundings = refused_now() if sampled else None
    if surroundings is not None:
        raise CaptureError(f"add_tvm_dispatch cannot trace the module here: {surroundings}")
    installed = module.__dict__.get("forward")
    if chosen.freeze:
        _refuse_to_freeze(module, dynamic_shapes)
    sizes = sizes_to_serve(module, dynamic_shapes, (args, kwargs) if sampled else None)
    if isinstance(installed, Dispatcher):
        dispatcher = installed
        if freeze not in (None, dispatcher.options.freeze):
            raise ValueError(
                f"freeze is {freeze}, and an earlier dispatch of this module has set the contrary: "
                "call remove_tvm_dispatch first"
            )
        if sizes not in (None, "auto", getattr(dispatcher.any_size, "spec", None)):
            raise ValueError(
                "an earlier dispatch of this module had another dynamic_shapes: call "
                "remove_tvm_dispatch first"
            )
        dispatcher.renew_after_fork()
        if budget is not None:
            dispatcher.background.budget = chosen.budget
        if on_break is not None:
            dispatcher.cut = _cut(dispatcher, on_break)
    else:
        dispatcher = Dispatcher(module, installed, target, chosen)
        dispatcher.cut = _cut(dispatcher, on_break or "eager")
        if sizes is not None:
            dispatcher.serve_any_size(None if sizes == "auto" else sizes)
        if policy.word != "never":
            dispatcher.checker = Checker(policy, chosen)
    register_containers(module)
    if sampled:
        try:
            with gathered(module):
                compile_sample(dispatcher, args, kwargs)
        except DataDependentError as error:
            if not dispatcher.cut.at(str(error)):
                raise
    elif not isinstance(dispatcher.any_size, DeclaredSizes):
        dispatcher.compiles_signatures = True
    if on_fallback is not None:
        dispatcher.tally.on_fallback = on_fallback
    module.__dict__["forward"] = dispatcher
    return module


def _cut(dispatcher: Dispatcher, on_break: str) -> Cut:
    if on_break == "forward" or dispatcher.options.freeze:
        return Cut()

    def make(of: Dispatcher) -> ServedParts:
        # Imported where there are parts: with TorchDynamo comes a second of imports.
        from tvmbridge.dynamo.parts import ModuleInParts

        return ModuleInParts(of)

    return Cut(make, dispatcher)


def _refuse_to_freeze(module: nn.Module, dynamic_shapes: Any) -> None:
    if module.training:
        raise ValueError("freeze=True is for evaluation: call module.eval() first")
    if dynamic_shapes is not None:
        raise ValueError("freeze=True compiles for the sizes of samples alone, not dynamic_shapes")


def _dispatcher_of(module: nn.Module) -> Dispatcher:
    dispatcher = module.__dict__.get("forward") if isinstance(module, nn.Module) else None
    dispatcher = standing_behind(dispatcher)
    if not isinstance(dispatcher, Dispatcher):
        raise ValueError(
            f"this {type(module).__name__} is not dispatched; call add_tvm_dispatch first"
        )
    return dispatcher


def dispatchers_of(module: nn.Module) -> dict[str, Dispatcher]:
    """The dispatchers of a module's forward and methods, by name."""
    methods = methods_of(module) if isinstance(module, nn.Module) else {}
    found = {name: _dispatcher_of(method.holder) for name, method in methods.items()}
    if found and standing_behind(module.__dict__.get("forward")) is None:
        return found
    return {"forward": _dispatcher_of(module), **found}


def remove_tvm_dispatch(module: nn.Module) -> nn.Module:
    """Give ``module`` back its forward and methods; it is then exactly as before dispatch.

    Raises:
        ValueError: the module is not dispatched, or its forward was wrapped since.
    """
    methods = methods_of(module)
    for name, method in methods.items():
        _dispatcher_of(method.holder).background.cancel()
        uninstall(module, name)
    if methods and standing_behind(module.__dict__.get("forward")) is None:
        return module
    dispatcher = _dispatcher_of(module)
    if module.__dict__["forward"] is not dispatcher:
        raise ValueError(
            f"the forward of this {type(module).__name__} was wrapped after it was dispatched "
            "(by accelerate's prepare, say): unwrap it first"
        )
    dispatcher.background.cancel()
    if dispatcher.own is None:
        del module.__dict__["forward"]
    else:
        module.__dict__["forward"] = dispatcher.own
    return module


def wait(module: nn.Module, timeout: float | None = None) -> None:
    """Return when no code of ``module`` is being compiled in the background any more.

    The next call takes it up. What calls ask for while other code is compiled begins at a later
    call.

    Args:
        timeout: seconds; None: as long as it takes.

    Raises:
        TimeoutError: it has not ended by then, and goes on.
        ValueError: the module is not dispatched.
    """
    for dispatcher in dispatchers_of(module).values():
        dispatcher.background.wait(timeout)


def dispatch_report(module: nn.Module) -> DispatchReport:
    """What the dispatch of ``module`` has compiled, served and refused so far.

    Raises:
        ValueError: the module is not dispatched.
    """
    return report_of_all(dispatchers_of(module))
