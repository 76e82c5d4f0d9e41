"""Container arguments: forward's changes are made to the caller's own objects."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tvmbridge
from tvmbridge.core.libraries import register_containers


class Fills(nn.Module):
    """Appends to a list, adds an item to a dict, and returns the list itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, found: list[Any], named: dict[str, Any]) -> Any:
        y = self.linear(x)
        found.append(y)
        named["sum"] = y + named["start"]
        return {"y": y * 2, "found": found}


def _arguments() -> tuple[torch.Tensor, list[Any], dict[str, Any]]:
    return torch.ones(2, 4), [torch.zeros(2)], {"start": torch.ones(4)}


@pytest.mark.parametrize("training", [False, True])
def test_containers_that_forward_fills(training: bool) -> None:
    module = Fills().train(training)
    expected = _arguments()
    theirs = module(*expected)
    tvmbridge.add_tvm_dispatch(module, _arguments())
    given = _arguments()
    ours = module(*given)
    report = tvmbridge.dispatch_report(module)
    assert (report.tvm_calls, report.fallbacks) == (1, {})
    assert ours["found"] is given[1]
    assert given[1][0].shape == (2,)
    torch.testing.assert_close(ours["y"], theirs["y"])
    torch.testing.assert_close(given[1], expected[1])
    torch.testing.assert_close(given[2], expected[2])
    assert given[1][1].requires_grad is expected[1][1].requires_grad
    if training:
        torch.testing.assert_close(*_gradients(module, (given, expected)))


def _gradients(module: nn.Module, calls: Any) -> list[torch.Tensor]:
    parameter = next(module.parameters())
    return [torch.autograd.grad(c[2]["sum"].square().sum(), parameter)[0] for c in calls]


def test_an_argument_that_is_changed_in_the_sample_call_is_left_alone() -> None:
    given = _arguments()
    tvmbridge.add_tvm_dispatch(Fills().eval(), given)
    assert len(given[1]) == 1
    assert list(given[2]) == ["start"]


class Reads(nn.Module):
    """Reads a list of one tensor."""

    def forward(self, x: torch.Tensor, more: list[torch.Tensor]) -> torch.Tensor:
        return x + more[0]


def test_a_list_of_one_tensor_is_served() -> None:
    module = Reads().eval()
    given = (torch.ones(3), [torch.ones(3)])
    tvmbridge.add_tvm_dispatch(module, given)
    torch.testing.assert_close(module(*given), torch.full((3,), 2.0))
    assert tvmbridge.dispatch_report(module).tvm_calls == 1


def _gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2
    )
    model: nn.Module = transformers.GPT2LMHeadModel(config).eval()
    register_containers(model)
    return model


def test_a_cache_of_keys_and_values_is_filled_in_place() -> None:
    model = _gpt2()
    prompt, token = torch.tensor([[3, 4, 5]]), torch.tensor([[6]])
    with torch.no_grad():
        cache = model(prompt, use_cache=True).past_key_values
        layer = cache.layers[0]
        expected = model(torch.cat([prompt, token], 1)).logits[:, -1:]
        keywords = {"past_key_values": cache, "use_cache": True}
        tvmbridge.add_tvm_dispatch(model, (token,), sample_kwargs=keywords)
        assert cache.get_seq_length() == 3
        outputs = model(token, **keywords)
    assert tvmbridge.dispatch_report(model).tvm_calls == 1
    assert type(outputs).__name__ == "CausalLMOutputWithCrossAttentions"
    assert outputs.past_key_values is cache
    assert cache.layers[0] is layer
    assert cache.get_seq_length() == 4
    torch.testing.assert_close(outputs.logits, expected)


class Keywords(nn.Module):
    """A forward whose result depends on the order of further keyword arguments."""

    def forward(self, x: torch.Tensor, *, scale: float = 1.0, **more: float) -> torch.Tensor:
        for name in more:
            x = (x + 1) * more[name]
        return x * scale


def test_the_order_of_further_keywords_is_seen() -> None:
    module = Keywords().eval()
    x = torch.ones(2)
    tvmbridge.add_tvm_dispatch(module, x, sample_kwargs={"a": 2.0, "scale": 3.0, "b": 5.0})
    assert torch.equal(module(x, scale=3.0, a=2.0, b=5.0), torch.full((2,), 75.0))
    assert torch.equal(module(x, b=5.0, scale=3.0, a=2.0), torch.full((2,), 66.0))
    report = tvmbridge.dispatch_report(module)
    assert (report.tvm_calls, report.fallbacks) == (
        1,
        {"the structure of the arguments differs": 1},
    )


class AsksLayout(nn.Module):
    """A forward whose result depends on the memory layout of its argument."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        window = torch.as_strided(x, (2, 3), (1, 2))
        return window * x.stride(0) if x.is_contiguous() else window


def test_forward_that_asks_for_strides_is_served_for_those_of_the_sample() -> None:
    module = AsksLayout().eval()
    x = torch.arange(6.0)
    tvmbridge.add_tvm_dispatch(module, x.reshape(2, 3))
    for given in (x.reshape(2, 3), x.reshape(3, 2).t()):
        assert torch.equal(module(given), module.forward.code.original(given))  # type: ignore[union-attr]
    report = tvmbridge.dispatch_report(module)
    assert (report.tvm_calls, report.fallbacks) == (
        1,
        {"an input is laid out otherwise, and forward asks for that": 1},
    )
