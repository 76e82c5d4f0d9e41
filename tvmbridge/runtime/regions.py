"""Regions: each repeated block of a module has code of its own, and equal blocks share it.

A model of 48 equal layers is 48 calls of the code of one layer. PyTorch runs what is around them.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.nn.utils import parametrize

from tvmbridge.core.reasons import Kind, Reason
from tvmbridge.recall import SharedPlans
from tvmbridge.runtime.checks import Checks
from tvmbridge.runtime.dispatcher import Dispatcher, code_of
from tvmbridge.runtime.guards.forwards import forward_of_instance
from tvmbridge.runtime.module_code import ModuleCode
from tvmbridge.runtime.parts import NO_PART, Cut, PartReport

WHY = 'its repeated blocks are regions (regions="repeated")'

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
# The code of these modules is no code of their class.
_NO_BLOCKS = (fx.GraphModule, torch.jit.ScriptModule)


def blocks_of(module: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost repeated blocks of ``module``, each once, by their dotted names.

    A block has submodules and a forward, and a sibling of the same structure. In a container with
    such siblings, its other elements with submodules are blocks as well.
    """
    return dict(_blocks(module, "", set()))


def _blocks(owner: nn.Module, path: str, met: set[int]) -> Iterator[tuple[str, nn.Module]]:
    children = [(n, child) for n, child in owner._modules.items() if child is not None]
    kinds = {id(child): _structure(child) for _, child in children if _may_be_block(child)}
    often = Counter(kinds[id(child)] for _, child in children if id(child) in kinds)
    repeated = {kind for kind, count in often.items() if count > 1}
    if repeated and isinstance(owner, _CONTAINERS):
        repeated = set(often)
    for name, child in children:
        full = f"{path}.{name}" if path else name
        if id(child) in met:
            continue
        met.add(id(child))
        if kinds.get(id(child)) in repeated:
            yield full, child
        else:
            yield from _blocks(child, full, met)


def _may_be_block(module: nn.Module) -> bool:
    has_forward = type(module).forward is not nn.Module.forward
    return bool(module._modules) and has_forward and not isinstance(module, _NO_BLOCKS)


def _structure(module: nn.Module) -> tuple[Any, ...]:
    """Return the classes, and the names and shapes of the tensors, of a module and what it has."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    shapes = ((name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors)
    return (tuple((name, _kind(each)) for name, each in module.named_modules()), tuple(shapes))


def _kind(module: nn.Module) -> Any:
    """Return the class of a module; a parametrized one has a class of its own for each instance."""
    kind = type(module)
    return ("parametrized", kind.__bases__) if parametrize.is_parametrized(module) else kind


class _RegionCall(threading.local):
    """Why PyTorch has served blocks in the present call of this thread."""

    reasons: tuple[str, ...] = ()


class Regions:
    """A dispatched module that calls its repeated blocks, which are dispatched, by its own forward.

    It implements :class:`~tvmbridge.runtime.parts.ServedParts`. A deep copy of the module has
    copies of the blocks' dispatchers, which the copy's regions take over.

    Args:
        of: the code of the module.
        cut: returns the decision whether a block that is no single graph runs in parts.
        checker: returns what compares a block's calls with eager PyTorch; None: nothing does.
    """

    def __init__(
        self,
        of: ModuleCode,
        cut: Callable[[ModuleCode], Cut],
        checker: Callable[[], Checks | None],
    ) -> None:
        self.made = 0  # TorchDynamo captures none of them
        self._of, self._cut, self._checker = of, cut, checker
        self._shared = SharedPlans()
        self._now = _RegionCall()
        self._reached = False
        self._codes: dict[str, ModuleCode] = {}
        self.dispatch()

    def dispatch(self) -> None:
        """Dispatch the blocks that the module has now."""
        codes: dict[str, ModuleCode] = {}
        for name, block in blocks_of(self._of.module).items():
            code = region_of(block)
            if code is None:
                code = _dispatched(self._of, block, self._shared)
                if code is None:
                    continue
                code.policy.cut, code.checker = self._cut(code), self._checker()
            code.tally.noted = self._note
            codes[name] = code
        self._codes = codes

    def run(
        self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any, Reason | None]:
        """Run ``original``, the forward of the module, whose blocks run on their code.

        Returns:
            The results, and why PyTorch has served a block; None if code has served all.
        """
        on_fallback = "raise" if self._of.tally.on_fallback == "raise" else "silent"
        for code in self._codes.values():
            code.tally.on_fallback = on_fallback
        outer, self._now.reasons = self._now.reasons, ()
        try:
            results = original(*args, **kwargs)
            reasons = self._now.reasons
        finally:
            self._now.reasons = outer
        if reasons:
            return results, Reason(Kind.OF_PART, reasons[0])
        self._reached = self._reached or any(map(_has_served, self._codes.values()))
        return results, None if self._reached else NO_PART

    def _note(self, reason: str) -> None:
        self._now.reasons = (*self._now.reasons, reason)

    def reports(self) -> tuple[PartReport, ...]:
        """Return a report of each kind of blocks, with the number of blocks that share its code."""
        kinds: dict[tuple[Any, ...], list[ModuleCode]] = {}
        for code in self._codes.values():
            kinds.setdefault(_structure(code.module), []).append(code)
        return tuple(_report(codes) for codes in kinds.values())

    def breaks(self) -> Mapping[str, int]:
        """Return nothing: the module is cut at its blocks, and for no other reason."""
        return {}


def _dispatched(of: ModuleCode, block: nn.Module, shared: SharedPlans) -> ModuleCode | None:
    """Dispatch a block; return None if it has a dispatcher of the user's."""
    own = forward_of_instance(block)
    if isinstance(own, Dispatcher):
        return None
    code = ModuleCode(block, own, of.policy.compiler.target, of.options, "silent")
    code.become_region(shared)
    block.__dict__["forward"] = Dispatcher(code)
    return code


def region_of(module: nn.Module) -> ModuleCode | None:
    """Return the code of ``module`` if it is a region of another module; else None."""
    code = code_of(module.__dict__.get("forward"), ModuleCode)
    return code if code is not None and code.policy.compiler.shared is not None else None


def dispatch_blocks(cut: Cut) -> None:
    """Dispatch blocks that were put into the module after its regions were created."""
    if isinstance(cut.parts, Regions):
        cut.parts.dispatch()


def remove_regions(module: nn.Module) -> None:
    """Restore the forwards of the blocks of ``module`` that are regions."""
    for block in module.modules():  # some may be no blocks any more
        code = region_of(block)
        if code is None:
            continue
        if code.own is None:
            del block.__dict__["forward"]
        else:
            block.__dict__["forward"] = code.own


def _has_served(code: ModuleCode) -> bool:
    trials = (e.trial for s in code.policy.specializations() for _, e in s.compiled())
    timed = any(t is not None and t.timed_calls + t.aside_calls > 0 for t in trials)
    return timed or code.served() > 0


def _report(codes: list[ModuleCode]) -> PartReport:
    """Return one report of the blocks of one structure."""
    entries = [e for c in codes for s in c.policy.specializations() for _, e in s.compiled()]
    compiled = len({id(entry.compiled.loaded) for entry in entries})
    operators = max((_operators(entry.compiled) for entry in entries), default=0)
    eager: Counter[str] = Counter()
    for code in codes:
        eager.update(code.tally.counts)
    name = f"{type(codes[0].module).__name__} ({len(codes)} blocks, {compiled} compiled)"
    alone = dict.fromkeys(entry.alone for entry in entries if entry.alone)
    calls = sum(code.served() for code in codes)
    return PartReport(name, operators, calls, eager, next(iter(alone), ""))


def _operators(compiled: Any) -> int:
    return sum(compiled.native_calls.values()) + sum(compiled.aten_calls.values())
