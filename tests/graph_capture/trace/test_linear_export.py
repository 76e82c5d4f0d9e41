"""The replacement that makes torch.export linear in time puts parameters in the same places."""

from __future__ import annotations

import torch
from torch import nn
from torch.export._unlift import _assign_attr, _AttrKind

from tvmbridge.graph_capture.trace.linear_export import _assigned


def _holder() -> nn.Module:
    """Return a module with submodules ``a`` and ``b``; ``b`` has one that is called twice."""
    module = nn.Module()
    for name in ("a", "b"):
        module.add_module(name, nn.Module())
    for name in ("c", "c@1"):
        module.b.add_module(name, nn.Module())
    return module


def test_values_get_where_pytorch_puts_them() -> None:
    for path in ("w", "a.w", "new.one.w", "b.c.w", "a.c.w"):
        value = nn.Parameter(torch.ones(2))
        ours, theirs = _holder(), _holder()
        _assigned(_assign_attr, value, ours, path, attr_kind=_AttrKind.PARAMETER)
        _assign_attr(value, theirs, path, attr_kind=_AttrKind.PARAMETER)
        found = [dict(m.named_parameters(remove_duplicate=False)) for m in (ours, theirs)]
        assert found[0].keys() == found[1].keys()
        assert all(each is value for each in found[0].values())
        assert [n for n, _ in ours.named_modules()] == [n for n, _ in theirs.named_modules()]
