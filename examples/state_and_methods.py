"""Modules as people write them: they keep state in attributes, or have methods beside forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from examples.doors import Report
from tvmbridge import add_tvm_dispatch, dispatch_report

CALLS = 48


class Spectrum(nn.Module):
    """A module that stores the magnitudes of its last call in ``self.mag``."""

    window: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(32))
        self.head = nn.Linear(17, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.stft(x, 32, 16, window=self.window, return_complex=True)
        self.mag = spectrum.abs()
        return self.head(self.mag.mean(-1))  # type: ignore[no-any-return]


class Agent(nn.Module):
    """An agent that stores the distribution of its last actions in ``self.dist``."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.Tanh())
        self.policy, self.critic = nn.Linear(32, 4), nn.Linear(32, 1)

    def act(self, x: torch.Tensor) -> torch.Tensor:
        self.dist = torch.distributions.Categorical(logits=self.policy(self.body(x)))
        return self.dist.sample()  # type: ignore[no-untyped-call, no-any-return]

    def value(self, x: torch.Tensor) -> torch.Tensor:
        return self.critic(self.body(x)).squeeze(-1)  # type: ignore[no-any-return]


class Autoencoder(nn.Module):
    """A variational autoencoder that scripts call by ``encode`` and ``decode``."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.SiLU(), nn.Conv2d(8, 8, 3, 2, 1))
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(4, 8, 4, 2, 1), nn.SiLU(), nn.ConvTranspose2d(8, 3, 4, 2, 1)
        )

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, 1)
        return mean, log_variance

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        return self.decoder(z).sigmoid()  # type: ignore[no-any-return]


class Rotary(nn.Module):
    """Attention that computes its tables of cosines and sines at the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(16, 48)
        self.cos: torch.Tensor | None = None
        self.sin: torch.Tensor | None = None

    def tables(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.cos is None or self.sin is None or len(self.cos) < length:
            angles = torch.outer(torch.arange(length), 1e4 ** -torch.linspace(0, 1, 8))
            self.cos, self.sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
        return self.cos[:length], self.sin[:length]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.projection(x).chunk(3, -1)
        cos, sin = self.tables(x.shape[1])
        q, k = (t * cos + torch.cat((-t[..., 8:], t[..., :8]), -1) * sin for t in (q, k))
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


class UNet(nn.Module):
    """A U-Net that takes its timestep as a Python number."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(3, 8, 3, 2, 1), nn.ConvTranspose2d(8, 3, 4, 2, 1)
        self.time = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, timestep: int) -> torch.Tensor:
        angles = timestep * torch.exp(-torch.arange(4.0))
        embedded = self.time(torch.cat((angles.sin(), angles.cos())))
        return self.up(nn.functional.silu(self.down(x) + embedded[:, None, None]))  # type: ignore[no-any-return]


def _spectra(model: Any, number: int) -> list[torch.Tensor]:
    out = model(torch.randn(2, 128))
    return [out, model.mag]


def _agent(model: Any, number: int) -> list[torch.Tensor]:
    observed = torch.randn(4, 8)
    actions = model.act(observed)
    return [actions.float(), model.dist.log_prob(actions), model.value(observed)]


def _autoencoder(model: Any, number: int) -> list[torch.Tensor]:
    mean, log_variance = model.encode(torch.rand(2, 3, 16, 16))
    z = mean + torch.randn_like(mean) * (log_variance / 2).exp()
    return [mean, log_variance, model.decode(z)]


def _rotary(model: Any, number: int) -> list[torch.Tensor]:
    return [model(torch.randn(2, 10, 16))]


def _unet(model: Any, number: int) -> list[torch.Tensor]:
    return [model(torch.randn(2, 3, 8, 8), 1000 - 20 * number)]


Call = Callable[[Any, int], list[torch.Tensor]]
MODELS: dict[str, tuple[Callable[[], nn.Module], Call, tuple[str, ...]]] = {
    "stft": (Spectrum, _spectra, ("forward",)),
    "agent": (Agent, _agent, ("act", "value")),
    "autoencoder": (Autoencoder, _autoencoder, ("encode", "decode")),
    "rotary": (Rotary, _rotary, ("forward",)),
    "unet": (UNet, _unet, ("forward",)),
}


def main(dispatch: bool = True, name: str = "stft") -> tuple[list[float], Report | None]:
    """Train; return the sum of squares of each tensor returned or stored, and the report."""
    make, call, methods = MODELS[name]
    torch.manual_seed(0)
    model = make()
    if dispatch:
        add_tvm_dispatch(model, methods=methods)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    results = []
    for number in range(CALLS):
        torch.manual_seed(number)
        returned = call(model, number)
        sum(t.square().mean() for t in returned if t.requires_grad).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
        results += [float(t.detach().double().square().sum()) for t in returned]
    return results, dispatch_report(model) if dispatch else None


if __name__ == "__main__":
    for name in MODELS:
        print(name, main(True, name)[1])
