"""The table of architectures, with the configuration and the inputs of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
from packaging.version import Version
from torch import nn

from tests.device import DEVICE

VOCABULARY = 99

Inputs = Mapping[str, Any]


@dataclass(frozen=True)
class Architecture:
    """A model of the transformers library with random weights.

    Args:
        family: encoder, decoder, encoder-decoder, vision, speech, experts or other.
        model: the name of the model's class.
        config: the name of its configuration's class.
        settings: the configuration's fields.
        inputs: returns the keyword arguments of forward; the generator is seeded before.
        cached: whether forward is also called with a cache of earlier keys and values.
        refused: a part of the reason why tvmbridge refuses the model; empty if it must run.
        refused_before: the first release of transformers with which the model must run; with older
            releases it may be refused in some modes. Empty if the release makes no difference.
    """

    family: str
    model: str
    config: str
    settings: Mapping[str, Any]
    inputs: Callable[[], Inputs]
    cached: bool = False
    refused: str = ""
    refused_before: str = ""

    def outcomes(self) -> dict[str, str]:
        """Return the allowed results, *whole* or *refused*, each with a part of its reason."""
        if not self.refused_before:
            return {"refused": self.refused} if self.refused else {"whole": ""}
        older = Version(version("transformers")) < Version(self.refused_before)
        return {"whole": "", **({"refused": self.refused} if older else {})}

    def build(self) -> nn.Module:
        """Build the model in eval mode, with weights drawn from a fixed seed."""
        import transformers

        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**self.settings)
        if DEVICE != "cpu":
            _without_dropout(config)
        model: nn.Module = getattr(transformers, self.model)(config)
        return model.eval()

    def sample(self) -> dict[str, Any]:
        """Return keyword arguments of forward, drawn from a fixed seed."""
        torch.manual_seed(1)
        return dict(self.inputs())


def _without_dropout(config: Any) -> None:
    """Set all dropout rates to 0.

    On a GPU, compiled attention draws other dropout masks than eager PyTorch, from the same
    distribution.
    """
    for name, value in list(vars(config).items()):
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
        elif name.endswith("_config") and hasattr(value, "to_dict"):
            _without_dropout(value)


def ids(length: int = 10, batch: int = 2) -> torch.Tensor:
    """Return token numbers, int64, (batch, length); none is padding or another special token."""
    return torch.randint(10, VOCABULARY - 5, (batch, length))


def mask(length: int = 10, batch: int = 2) -> torch.Tensor:
    """Return an attention mask, int64, (batch, length); the last row ends with padding."""
    result = torch.ones(batch, length, dtype=torch.int64)
    result[-1, -3:] = 0
    return result


def text() -> Inputs:
    """Return tokens, and an attention mask that excludes some of them."""
    return {"input_ids": ids(), "attention_mask": mask()}


def labelled() -> Inputs:
    """Return tokens, a mask, and a label for each token."""
    return {**text(), "labels": ids()}


def pixels(size: int = 32) -> Callable[[], Inputs]:
    """Return a function that draws an image batch, float32, (2, 3, size, size)."""
    return lambda: {"pixel_values": torch.randn(2, 3, size, size)}


def pair() -> Inputs:
    """Return source tokens, target tokens, and labels."""
    return {**text(), "decoder_input_ids": ids(7), "labels": ids(7)}


def architectures() -> dict[str, Architecture]:
    """Return all architectures by name."""
    return dict(_all())


def _all() -> Iterator[tuple[str, Architecture]]:
    from tests.architectures import decoders, encoders, others, perception, sequences

    for module in (encoders, decoders, sequences, perception, others):
        yield from module.TABLE.items()
