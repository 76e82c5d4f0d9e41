"""Keys: short names of specs, under which compiled code hands them to kernels.

A kernel gets the key at each call, copies it and looks it up. A spec has hundreds of bytes.
"""

from __future__ import annotations

import base64
import hashlib

_LONGEST = 7
# A second one is needed once in 10**13 specs.
_MOST_SALTS = 4

_keys: dict[str, str] = {}
_specs: dict[str, str] = {}


def key_of(spec: str) -> str:
    """The key of ``spec``: the same one for the same spec, at most seven bytes long.

    It is the same in every process, unless two specs in this one have the same digest.
    """
    if len(spec.encode()) <= _LONGEST:
        return spec
    known = _keys.get(spec)
    salt = 0
    while known is None:
        key = _derived(spec, salt)
        # Another thread may name the same spec meanwhile: whoever is first names it for both.
        if key != spec and _specs.setdefault(key, spec) == spec:
            known = _keys.setdefault(spec, key)
        salt += 1
    return known


def may_be_key_of(key: str, spec: str) -> bool:
    """Whether some process may have named ``spec`` by ``key``."""
    return any(key == _derived(spec, salt) for salt in range(_MOST_SALTS))


def _derived(spec: str, salt: int) -> str:
    digest = hashlib.sha256(f"{salt} {spec}".encode()).digest()
    return base64.b85encode(digest)[:_LONGEST].decode()


def adopt(keys: dict[str, str]) -> bool:
    """Name specs by these keys, as compiled code of another process does; False: it cannot be.

    A key that stands for another spec here already would send the code's calls to that.
    """
    return all(_specs.setdefault(key, spec) == spec for key, spec in keys.items())


def spec_named(key: str) -> str:
    """The spec that ``key`` is the key of; a spec itself stays as it is."""
    return _specs.get(key, key)
