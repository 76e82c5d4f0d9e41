"""A pack: the parameters that may be moved into it, which stay the module's own parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tvmbridge.compiler.pack import Pack, is_at, unmovable, unpackable


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_any_dtype_can_be_packed(dtype: torch.dtype) -> None:
    weights = [nn.Parameter(torch.randn(rows, 32).to(dtype)) for rows in (4, 2, 6)]
    values = [w.detach().clone() for w in weights]
    pack = Pack(weights)
    pack.take_in(weights)
    assert pack.holds(weights)
    assert pack.in_use()
    assert torch.equal(pack.tensor, torch.cat(values))
    weights[1].data.zero_()
    assert not pack.tensor[4:6].any()


def test_unpackable_says_why() -> None:
    a, b, c = (nn.Parameter(torch.randn(3, n)) for n in (16, 16, 5))
    assert unpackable([a, a]) == "a parameter stands in it twice"
    assert unpackable([a, c]) == "different shapes or dtypes"
    assert unpackable([c, nn.Parameter(torch.randn(2, 5))]) == (
        "a parameter would begin at an address that is not aligned"
    )
    assert unpackable([a, b]) is None


def test_parameters_in_one_storage_may_move_where_they_do_not_overlap() -> None:
    module = nn.Module()
    flat = torch.randn(6, 16)
    module.a, module.b = nn.Parameter(flat[:4]), nn.Parameter(flat[4:])
    held = unmovable(module.a, module)
    assert held == "something else holds its memory, a view or a tied parameter"
    del flat
    assert unmovable(module.a, module) is None
    module.b.data = module.a.data[2:]
    assert unmovable(module.a, module) == "another parameter or buffer shares its memory"


def test_a_moved_parameter_has_the_memory_that_it_had_before() -> None:
    weights = [nn.Parameter(torch.randn(2, 32)) for _ in range(3)]
    addresses = [w.data_ptr() for w in weights]
    pack = Pack(weights)
    old = pack.take_in(weights)
    assert all(map(is_at, weights, addresses))
    second = Pack(weights)
    old += second.take_in(weights)
    assert all(map(is_at, weights, addresses))
    assert not is_at(weights[0], addresses[1])
    weights[2].data = weights[2].data.clone()
    assert [is_at(w, a) for w, a in zip(weights, addresses, strict=True)] == [True, True, False]
    assert not is_at(torch.randn(2, 32), addresses[0])
