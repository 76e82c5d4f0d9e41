"""A specialisation: one input signature, with the code compiled for it in each mode."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from tvmbridge.compiler.packing import Packing
from tvmbridge.runtime.entry import Variant
from tvmbridge.runtime.guards.mode import Flags, Mode
from tvmbridge.runtime.guards.signature import Signature

_DROPPED = (
    "code for this requires_grad of inputs and parameters was dropped, of more than "
    "max_specializations not used for longest"
)
_FULL = (
    "there is code for max_specializations choices of requires_grad of inputs and parameters, and "
    "not for this one"
)


class Specialization:
    """One signature and its variants by mode, in each mode by ``requires_grad`` of all tensors.

    Of a mode the variant that was used last is the first. What could not be compiled has a reason,
    and so has what was dropped: neither is tried again by calls.
    """

    def __init__(self, signature: Signature) -> None:
        self.signature = signature
        self.variants: dict[Mode, tuple[Variant, ...]] = {}
        self.failures: dict[tuple[Mode, Flags], str] = {}
        self.last_use = 0
        self._changing = threading.Lock()

    def compiled(self) -> list[tuple[Mode, Variant]]:
        """The variants of now by mode; another thread may compile one meanwhile."""
        return [(mode, v) for mode, variants in list(self.variants.items()) for v in variants]

    def chosen(self, mode: Mode, leaves: Sequence[Any]) -> Variant | None:
        """The variant for a call in this mode; where none fits its flags, the one used last."""
        variants = self.variants.get(mode)
        if not variants:
            return None
        if len(variants) == 1:
            return variants[0]
        for variant in variants:
            if variant.fits_flags(leaves, variant.state.tensors()):
                if variant is not variants[0]:
                    self._put_first(mode, variant)
                return variant
        return variants[0]

    def _put_first(self, mode: Mode, variant: Variant) -> None:
        with self._changing:
            variants = self.variants.get(mode, ())
            # Another thread may have dropped it.
            if variant in variants:
                others = (v for v in variants if v is not variant)
                self.variants[mode] = (variant, *others)

    def known(self, mode: Mode, flags: Flags) -> Variant | str | None:
        """What was compiled for these flags, or why it is not there; None: it was not tried."""
        variants = self.variants.get(mode, ())
        found = next((v for v in variants if v.flags == flags), None)
        return found or self.failures.get((mode, flags))

    def full(self, mode: Mode, most: int) -> str | None:
        """Why calls may not compile further code in ``mode``; None: they may."""
        tried = sum(failed == mode for failed, _ in list(self.failures))
        return _FULL if len(self.variants.get(mode, ())) + tried >= most else None

    def add(self, mode: Mode, variant: Variant, most: int) -> int:
        """Keep ``variant``; of more than ``most`` in a mode the others go, and are counted."""
        with self._changing:
            others = [v for v in self.variants.get(mode, ()) if v.flags != variant.flags]
            kept = (variant, *others)
            self.variants[mode] = kept[:most]
            self.failures.pop((mode, variant.flags), None)
            for dropped in kept[most:]:
                self.failures[mode, dropped.flags] = _DROPPED
        return len(kept[most:])

    def remove(self, variant: Variant) -> None:
        """Keep ``variant`` no longer."""
        with self._changing:
            for mode, variants in list(self.variants.items()):
                self.variants[mode] = tuple(v for v in variants if v is not variant)

    def rebound(self, memo: Mapping[int, Any], packing: Packing) -> Specialization:
        """The same code for a deep copy of the module, with counters at zero.

        Code that no longer fits the module is not copied: the copy could not tell.
        """
        copy = Specialization(self.signature)
        for mode, variants in list(self.variants.items()):
            fitting = [v for v in variants if not v.state.replaced()]
            copy.variants[mode] = tuple(v.rebound(memo, packing) for v in fitting)
        copy.failures = dict(self.failures)
        copy.last_use = self.last_use
        return copy
