"""Keys: short names of specs, under which compiled code hands them to kernels.

A string of more than seven bytes reaches a Python function of TVM's as an object. When a signal
handler raises while it is converted (Ctrl-C during a call does), apache-tvm-ffi 0.1.14 gives up a
reference to it that it does not have: the spec is freed under the code that still reads it, and a
later call crashes. Shorter strings are passed by value.
"""

from __future__ import annotations

import itertools

_LONGEST = 7

_numbers = itertools.count()
_keys: dict[str, str] = {}
_specs: dict[str, str] = {}


def key_of(spec: str) -> str:
    """The key of ``spec``: the same one for the same spec, at most seven bytes long."""
    if len(spec.encode()) <= _LONGEST:
        return spec
    # Another thread may name the same spec meanwhile: whoever is first has named it for both.
    key = _keys.setdefault(spec, f"{next(_numbers):x}")
    _specs[key] = spec
    return key


def spec_named(key: str) -> str:
    """The spec that ``key`` is the key of; a spec itself stays as it is."""
    return _specs.get(key, key)
