"""Configurations as libraries store them: frozen dictionaries, settings set at a first call."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import torch
from torch import nn

from tests.dispatch_helpers import eager
from tvmbridge import add_tvm_dispatch, dispatch_report


class Frozen(OrderedDict):  # type: ignore[type-arg]
    """A dictionary whose items are attributes too; its constructor sets one more attribute."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for key, value in self.items():
            setattr(self, key, value)
        self.__frozen = True

    def __setitem__(self, name: str, value: Any) -> None:
        if getattr(self, "__frozen", False):
            raise TypeError("frozen")
        super().__setitem__(name, value)


class Configured(nn.Module):
    """A model that stores its configuration as diffusers' models do."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self._internal_dict = Frozen(settings)

    def __getattr__(self, name: str) -> Any:
        if "_internal_dict" in self.__dict__ and hasattr(self.__dict__["_internal_dict"], name):
            return self._internal_dict[name]
        return super().__getattr__(name)

    @property
    def config(self) -> dict[str, Any]:
        return self._internal_dict

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.config.center_input_sample:  # type: ignore[attr-defined]
            x = 2 * x - 1
        return self.linear(x) * self.scale  # type: ignore[no-any-return]


def _made() -> Configured:
    torch.manual_seed(0)
    return Configured(center_input_sample=True, scale=2.0, blocks=("down", "up"), act="silu")


def test_a_frozen_dictionary_is_what_it_was() -> None:
    module, x = _made().eval(), torch.randn(2, 4)
    expected = module(x)
    add_tvm_dispatch(module, x)
    for served in (module, copy.deepcopy(module)):
        for _ in range(3):
            torch.testing.assert_close(served(x), expected)
        report = dispatch_report(served)
        assert (report.tvm_calls, report.fallbacks) == (3, {})


def test_another_setting_in_a_frozen_dictionary_is_noticed() -> None:
    module, x = _made().eval(), torch.randn(2, 4)
    add_tvm_dispatch(module, x)
    module(x)
    settings = {**module._internal_dict, "scale": 3.0}
    module._internal_dict = Frozen(settings)
    torch.testing.assert_close(module(x), eager(module)(x))
    fallbacks = dispatch_report(module).fallbacks
    assert fallbacks == {"the attribute _internal_dict changed": 1}


class Ordered(nn.Module):
    """Depends on the order of attributes, which a plain deep copy changes."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = Frozen(first=2.0, second=3.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in vars(self.settings).values():
            x = x * 2 + number
        return x


def test_the_order_of_attributes_is_that_of_the_module() -> None:
    module, x = Ordered().eval(), torch.randn(2, 4)
    expected = module(x)
    assert not torch.equal(copy.deepcopy(module)(x), expected)
    add_tvm_dispatch(module, x)
    torch.testing.assert_close(module(x), expected)
    held = vars(module.settings)
    held["first"] = held.pop("first")
    torch.testing.assert_close(module(x), eager_order(module, x))
    report = dispatch_report(module)
    assert (report.tvm_calls, list(report.fallbacks)) == (1, ["the attribute settings changed"])


def eager_order(module: Ordered, x: torch.Tensor) -> torch.Tensor:
    """Run the class's own forward, which reads the attributes in their present order."""
    return Ordered.forward(module, x)


class Config:
    """A configuration that many submodules share."""

    def __init__(self) -> None:
        self.num_labels = 3
        self.problem_type: str | None = None


class Encoder(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.linear = nn.Linear(4, config.num_labels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)  # type: ignore[no-any-return]


class Classifier(nn.Module):
    """Sets the problem type from the labels of the first call, as HuggingFace's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.config = Config()
        self.encoder = Encoder(self.config)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.encoder(x)
        if self.config.problem_type is None:
            single = labels.dtype == torch.long
            self.config.problem_type = "single" if single else "regression"
        if self.config.problem_type == "single":
            return nn.functional.cross_entropy(logits, labels)
        return nn.functional.mse_loss(logits, labels)


def test_a_setting_made_at_the_first_call_settles() -> None:
    module: Any = Classifier().train()
    reference = copy.deepcopy(module)
    x, labels = torch.randn(5, 4), torch.randint(0, 3, (5,))
    add_tvm_dispatch(module, x, sample_kwargs={"labels": labels})
    assert module.config.problem_type is None
    for _ in range(4):
        ours, theirs = module(x, labels=labels), reference(x, labels=labels)
        torch.testing.assert_close(ours, theirs)
    assert module.config.problem_type == "single"
    assert module.encoder.config is module.config
    module.eval()
    with torch.no_grad():
        torch.testing.assert_close(module(x, labels=labels), reference.eval()(x, labels=labels))
    report = dispatch_report(module)
    assert (report.tvm_calls, sum(report.fallbacks.values())) == (4, 1)
