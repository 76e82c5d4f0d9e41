"""Dispatched methods agree with eager PyTorch, whether forward is dispatched too or not."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributions import Normal

from tvmbridge import BridgeError, add_tvm_dispatch, dispatch_report, remove_tvm_dispatch


class Coder(nn.Module):
    """A variational autoencoder with state, whose forward and ``act`` call its other methods."""

    scale = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(6, 4)
        self.decoder = nn.Linear(2, 6)
        self.dropout = nn.Dropout(0.5)
        self.calls = 0

    def encode(self, x: torch.Tensor, double: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        mean, spread = self.dropout(self.encoder(x)).chunk(2, -1)
        return mean * (2 if double else 1) * self.scale, spread

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.decoder(z).tanh()  # type: ignore[no-any-return]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, spread = self.encode(x)
        return self.decode(mean), spread

    def act(self, x: torch.Tensor) -> torch.Tensor:
        self.policy = Normal(self(x)[0], 1.0)
        return self.policy.mean

    @staticmethod
    def name() -> str:
        return "coder"


def _made() -> Coder:
    torch.manual_seed(0)
    return Coder()


def _trained(module: Any, x: torch.Tensor) -> list[Any]:
    module.zero_grad()
    torch.manual_seed(1)
    decoded, spread = module(x)
    (decoded.square().sum() + spread.exp().sum()).backward()
    return [decoded, spread, module.calls, *(p.grad for p in module.parameters())]


def test_methods_are_served_wherever_they_are_called() -> None:
    module, reference, x = _made(), _made(), torch.randn(3, 6)
    add_tvm_dispatch(module, methods=["encode", "decode"])
    report = dispatch_report(module)
    assert list(report.methods) == ["encode", "decode"]
    assert "encode: no call so far" in str(report)
    for _ in range(2):
        torch.testing.assert_close(_trained(module, x), _trained(reference, x))
    module.eval()
    reference.eval()
    with torch.no_grad():
        for call in (lambda m: m.encode(x), lambda m: m.encode(double=True, x=x)):
            torch.testing.assert_close(call(module), call(reference))
    report = dispatch_report(module)
    served = {name: each.tvm_calls for name, each in report.methods.items()}
    assert (served, report.tvm_calls, report.fallbacks) == ({"encode": 4, "decode": 2}, 6, {})
    assert inspect.signature(module.encode) == inspect.signature(reference.encode)
    assert dispatch_report(copy.deepcopy(module)).tvm_calls == 0


def test_a_method_that_calls_forward_and_leaves_a_distribution() -> None:
    module, reference, x = _made().eval(), _made().eval(), torch.randn(3, 6)
    add_tvm_dispatch(module, methods=["act", "forward"])
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(module.act(x), reference.act(x))
            torch.testing.assert_close(module.policy.loc, reference.policy.loc)
        torch.testing.assert_close(module(x), reference(x))
    assert module.calls == reference.calls == 4
    served = {n: r.tvm_calls for n, r in dispatch_report(module).methods.items()}
    assert served == {"forward": 1, "act": 3}


def test_changes_are_seen_by_methods() -> None:
    module, reference, x = _made().eval(), _made().eval(), torch.randn(3, 6)
    add_tvm_dispatch(module, methods={"encode": x})
    with torch.no_grad():
        copied = copy.deepcopy(module)
        for each in (module, reference):
            each.encoder.weight.mul_(2)
        torch.testing.assert_close(module.encode(x), reference.encode(x))
        assert dispatch_report(module).tvm_calls == 1
        torch.testing.assert_close(copied.encode(x), _made().eval().encode(x))
        assert dispatch_report(copied).tvm_calls == 1
        for each in (module, reference):
            each.scale = 3.0
        torch.testing.assert_close(module.encode(x), reference.encode(x))
        del module.scale
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Coder, "encode", lambda self, x: 7 * x)
            torch.testing.assert_close(module.encode(x), 7 * x)
    assert dispatch_report(module).tvm_calls == 1


def test_a_shallow_copy_that_differs_is_refused_by_name() -> None:
    module, x = _made().eval(), torch.randn(3, 6)
    add_tvm_dispatch(module, methods={"encode": x})
    encode = module.encode
    encode(x)
    copied = copy.copy(module)
    encode(x)  # the bound method may belong to the module or to the copy
    copied.scale = 5.0
    del encode
    with pytest.raises(BridgeError, match="shallow copy"):
        module.encode(x)
    del copied
    module.encode(x)
    torch.testing.assert_close(pickle.loads(pickle.dumps(module)).encode(x), module.encode(x))


def test_removal_undoes_all() -> None:
    module = _made()
    module.decode = own = lambda z: z * 2  # type: ignore[method-assign,assignment]
    before = dict(module.__dict__)
    add_tvm_dispatch(module, methods=["encode", "decode", "forward"])
    torch.testing.assert_close(module.decode(torch.ones(2)), torch.full((2,), 2.0))
    remove_tvm_dispatch(module)
    assert (module.__dict__, module.decode) == (before, own)
    with pytest.raises(ValueError, match="is not dispatched"):
        dispatch_report(module)


def test_what_is_no_method_is_refused() -> None:
    module = _made()
    for name in ("missing", "scale", "encoder", "name"):
        with pytest.raises(ValueError, match=name):
            add_tvm_dispatch(module, methods=["encode", name])
    with pytest.raises(TypeError, match="give a list"):
        add_tvm_dispatch(module, methods="encode")
    with pytest.raises(ValueError, match="in a dict"):
        add_tvm_dispatch(module, torch.ones(6), methods=["encode"])
    assert "encode" not in module.__dict__


class Asking(nn.Module):
    """Looks into its ``__dict__``, as models of diffusers do, and returns distributions."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, 2), nn.Linear(2, 4)

    def encode(self, x: torch.Tensor) -> Normal:
        return Normal(self.encoder(x), 2.0 if "double" in self.__dict__ else 1.0)

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        return self.decoder(z) if "plain" in self.__dict__ else self.decoder(z).tanh()


@pytest.mark.slow
def test_methods_that_look_into_the_dict_are_served_and_return_objects() -> None:
    model = Asking()
    served = add_tvm_dispatch(copy.deepcopy(model), methods=["encode", "decode"])
    for number in range(4):
        if number == 2:
            model.double = served.double = True
        x = torch.randn(3, 4)
        ours, theirs = served.encode(x), model.encode(x)
        assert type(ours) is Normal
        torch.testing.assert_close((ours.mean, ours.stddev), (theirs.mean, theirs.stddev))
        assert (ours.batch_shape, ours.event_shape) == (theirs.batch_shape, theirs.event_shape)
        z = torch.ones(3, 2)
        torch.testing.assert_close(served.decode(z), model.decode(z))
        grads = [
            torch.autograd.grad(d.mean.sum(), d_.encoder.weight)
            for d, d_ in ((ours, served), (theirs, model))
        ]
        torch.testing.assert_close(*grads)
    assert dispatch_report(served).tvm_calls == 8
