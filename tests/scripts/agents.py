"""Scripts whose modules have methods: agents, autoencoders."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.scripts.script import Door, script
from tests.scripts.state import STEPS, steps
from tests.scripts.training import stepped


class _Agent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh())
        self.policy, self.critic = nn.Linear(16, 4), nn.Linear(16, 1)

    def act(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.body(x)
        self.dist = torch.distributions.Categorical(logits=self.policy(h))
        action = self.dist.sample()
        return action, self.dist.log_prob(action), self.critic(h).squeeze(-1)

    def evaluate(self, x: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.body(x)
        dist = torch.distributions.Categorical(logits=self.policy(h))
        return dist.log_prob(action), self.critic(h).squeeze(-1), dist.entropy()


def _ppo(agent: Any, observe: Any, clip: float = 0.2) -> Iterator[list[Any]]:
    optimizer = torch.optim.Adam(agent.parameters(), lr=1e-3)
    for _ in range(4):
        xs, actions, logs, values = [], [], [], []
        for _ in range(6):
            x = observe()
            with torch.no_grad():
                action, log, value = agent.act(x)
            xs.append(x)
            actions.append(action)
            logs.append(log)
            values.append(value)
            yield [action, log, value]
        x, action, log, value = map(torch.cat, (xs, actions, logs, values))
        returns = value + torch.randn_like(value)
        advantage = (returns - value - (returns - value).mean()) / (returns - value).std()
        for _ in range(3):
            for rows in torch.randperm(len(x)).split(8):
                new, predicted, entropy = agent.evaluate(x[rows], action[rows])
                ratio = (new - log[rows]).exp()
                surrogate = torch.min(
                    ratio * advantage[rows], ratio.clamp(1 - clip, 1 + clip) * advantage[rows]
                )
                loss = -surrogate.mean() + 0.5 * F.mse_loss(predicted, returns[rows])
                loss = loss - 0.01 * entropy.mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
                yield [loss]


@script()
def ppo_discrete(door: Door) -> Iterator[list[Any]]:
    agent = door(_Agent(), methods=("act", "evaluate"))
    yield from _ppo(agent, lambda: torch.randn(4, 8))


class _Continuous(_Agent):
    def __init__(self) -> None:
        super().__init__()
        self.log_std = nn.Parameter(torch.zeros(4))

    def act(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.body(x)
        self.dist = torch.distributions.Normal(self.policy(h), self.log_std.exp())
        action = self.dist.sample()
        return action, self.dist.log_prob(action).sum(-1), self.critic(h).squeeze(-1)

    def evaluate(self, x: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.body(x)
        dist = torch.distributions.Normal(self.policy(h), self.log_std.exp().expand(len(x), 4))
        dist = torch.distributions.Independent(dist, 1)
        return dist.log_prob(action), self.critic(h).squeeze(-1), dist.entropy()


@script()
def ppo_continuous(door: Door) -> Iterator[list[Any]]:
    agent = door(_Continuous(), methods=("act", "evaluate"))
    yield from _ppo(agent, lambda: torch.randn(4, 8))


class _Sac(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.log_alpha = nn.Linear(8, 8), nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = self.body(x).chunk(2, -1)
        base = torch.distributions.Normal(mean, log_std.clamp(-5, 2).exp())
        dist = torch.distributions.TransformedDistribution(
            base, torch.distributions.transforms.TanhTransform(cache_size=1)
        )
        action = dist.rsample()
        return action, self.log_alpha.exp() * dist.log_prob(action).sum(-1)


@script()
def sac_policy(door: Door) -> Iterator[list[Any]]:
    yield from steps(door(_Sac()), lambda m, i: list(m(torch.randn(6, 8))), lr=1e-3)


class _Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(20, 16), nn.ReLU())
        self.mean, self.log_var = nn.Linear(16, 4), nn.Linear(16, 4)
        self.dec = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 20))

    def encode(self, x: Tensor) -> torch.distributions.Normal:
        h = self.enc(x)
        return torch.distributions.Normal(self.mean(h), (0.5 * self.log_var(h)).exp())

    def decode(self, z: Tensor) -> Tensor:
        return torch.sigmoid(self.dec(z))


@script()
def vae_methods(door: Door) -> Iterator[list[Any]]:
    model = door(_Vae(), methods=("encode", "decode"))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    prior = torch.distributions.Normal(torch.zeros(4), torch.ones(4))
    for i in range(STEPS):
        x = torch.rand(8, 20)
        posterior = model.encode(x)
        z = posterior.rsample()
        kl = torch.distributions.kl_divergence(posterior, prior).sum(-1).mean()
        loss = F.binary_cross_entropy(model.decode(z), x) + min(1.0, i / 10) * kl
        yield [stepped(optimizer, loss), z, kl]
    with torch.no_grad():
        for _ in range(4):
            yield [model.decode(torch.randn(3, 4))]
