"""Keys: short names of specs, which compiled code passes to kernels in place of the specs.

A spec is the JSON text that describes a kernel's work; it has hundreds of bytes. A kernel copies
and looks up the string at each call, so a short key is faster.
"""

from __future__ import annotations

import base64
import hashlib

_LONGEST = 7
# A second salt is needed for one in 10**13 specs.
_MOST_SALTS = 4

_keys: dict[str, str] = {}
_specs: dict[str, str] = {}


def key_of(spec: str) -> str:
    """Return the key of ``spec``, at most seven bytes long; a spec that short is its own key.

    The key is the same in every process, unless two specs in a process have the same digest.
    """
    if len(spec.encode()) <= _LONGEST:
        return spec
    known = _keys.get(spec)
    salt = 0
    while known is None:
        key = _derived(spec, salt)
        # Another thread may name the same spec at the same time; the first name holds for both.
        if key != spec and _specs.setdefault(key, spec) == spec:
            known = _keys.setdefault(spec, key)
        salt += 1
    return known


def may_be_key_of(key: str, spec: str) -> bool:
    """Whether ``key`` may be the key of ``spec`` in some process."""
    return any(key == _derived(spec, salt) for salt in range(_MOST_SALTS))


def _derived(spec: str, salt: int) -> str:
    digest = hashlib.sha256(f"{salt} {spec}".encode()).digest()
    return base64.b85encode(digest)[:_LONGEST].decode()


def adopt(keys: dict[str, str]) -> bool:
    """Add the keys (with their specs) that compiled code of another process uses.

    Return False if a key already belongs to another spec in this process: the code's calls would
    get the wrong spec, so the code must not be used.
    """
    return all(_specs.setdefault(key, spec) == spec for key, spec in keys.items())


def spec_named(key: str) -> str:
    """Return the spec of ``key``; a string that is no key is returned unchanged."""
    return _specs.get(key, key)
