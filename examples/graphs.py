"""Train a graph network on graphs of changing size; each convolution adds missing self loops.

``python -m examples.graphs`` trains for a few steps and prints the share of served calls.
"""

from __future__ import annotations

import torch
from torch import nn

from tvmbridge import add_tvm_dispatch, dispatch_report


class Convolution(nn.Module):
    """A graph convolution normalised by the degrees of nodes, like PyG's ``GCNConv``."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inner, outer)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        """Return new features (nodes, outer) from features ``x`` and ``edges`` (2, number)."""
        nodes = x.size(0)
        # The number of edges that are no loops depends on the data, so the graph breaks here.
        between = edges[:, edges[0] != edges[1]]
        loops = torch.arange(nodes).view(1, -1).repeat(2, 1)
        source, target = torch.cat([between, loops], 1)
        ones = torch.ones(source.size(0), dtype=x.dtype)
        degrees = torch.zeros(nodes, dtype=x.dtype).scatter_add_(0, target, ones)
        scale = degrees.pow(-0.5)
        messages = self.linear(x)[source] * (scale[source] * scale[target]).unsqueeze(-1)
        return torch.zeros_like(messages[:nodes]).index_add(0, target, messages)


class Network(nn.Module):
    """Two graph convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Convolution(16, 32), Convolution(32, 4)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        """Return the scores of four classes for each node."""
        return self.second(self.first(x, edges).relu(), edges)


def random_graph(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return features, edges and classes of a random graph of 30 to 60 nodes."""
    nodes = int(torch.randint(30, 60, (), generator=generator))
    x = torch.randn(nodes, 16, generator=generator)
    edges = torch.randint(0, nodes, (2, 4 * nodes), generator=generator)
    return x, edges, x[:, :4].argmax(-1)


def main(steps: int = 20) -> float:
    """Train, print the losses, and return the share of calls that compiled code served."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    network = add_tvm_dispatch(Network())
    optimizer = torch.optim.Adam(network.parameters(), 0.02)
    for step in range(steps):
        x, edges, classes = random_graph(generator)
        loss = nn.functional.cross_entropy(network(x, edges), classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    report = dispatch_report(network)
    print(f"served: {report.share:.0%}, in {len(report.parts)} parts")
    return report.share


if __name__ == "__main__":
    main()
