"""Choose residuals that fit a memory budget, for the least time of recomputation.

A budget is a fraction of the bytes that the policy ``save_all`` keeps. If the chosen policy takes
more, every operator that gives the same result twice may be computed again in backward. A minimum
cut then weighs the bytes of kept values against the estimated time of repeated ones. Its exchange
rate, the price of a second of time in bytes, is the highest one whose residuals fit.

The form of the search is Lagrangian relaxation (H. Everett, "Generalized Lagrange Multiplier
Method for Solving Problems of Optimum Allocation of Resources", 1963).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from tvm import relax

from tvmbridge.coloring.costs import cost, total
from tvmbridge.coloring.graph import JointGraph
from tvmbridge.coloring.min_cut import min_cut
from tvmbridge.coloring.save_all import save_all
from tvmbridge.differentiation.differentiate import JointModule

# Exchange rates, in bytes kept per byte of memory traffic: powers of ten, and steps of bisection.
_RATES = (-4.0, 2.0)
_STEPS = 9
# The search ends when this share of the limit is kept.
_CLOSE = 0.95
# Repeating the last operators costs more than the first by this share. Without it equal layers
# would all be repeated or none. Backward holds repeated early values when it has freed late ones.
_SLOPE = 0.25


@dataclass(frozen=True)
class Recomputation:
    """A choice of residuals under a memory budget, as it was predicted before compilation.

    - ``budget``: the fraction that was asked for.
    - ``full_bytes``: the bytes kept without recomputation.
    - ``kept_bytes``: the bytes kept by this choice.
    - ``predicted``: the estimated time of a step over that of one without recomputation.
    """

    budget: float
    full_bytes: int
    kept_bytes: int
    predicted: float

    @property
    def fits(self) -> bool:
        """Whether the residuals are within the budget."""
        return self.kept_bytes <= self.budget * self.full_bytes

    def __str__(self) -> str:
        share = self.kept_bytes / max(1, self.full_bytes)
        missed = "" if self.fits else ", which is the least that is possible"
        return (
            f"memory budget {self.budget:g}: keeps {self.kept_bytes / 1e6:.1f} of "
            f"{self.full_bytes / 1e6:.1f} MB ({share:.0%}{missed}); predicted time of a step "
            f"{self.predicted:.2f} times that without recomputation"
        )


def within_budget(
    joint: JointModule,
    repeated: frozenset[relax.Var],
    recompute: Collection[str],
    budget: float,
) -> frozenset[relax.Var]:
    """Return the variables that backward computes itself, so that residuals fit ``budget``.

    Args:
        repeated: the choice of a policy, which is taken if it fits.
        budget: a fraction of the bytes that :func:`save_all` keeps.

    Returns:
        The variables. If nothing fits, the choice that keeps the fewest bytes.
    """
    graph = JointGraph(joint, recompute)
    limit = budget * graph.bytes_kept(save_all(graph))
    if graph.bytes_kept(repeated) <= limit:
        return repeated
    cheap = min_cut(graph)
    if graph.bytes_kept(cheap) <= limit:
        return cheap
    graph = JointGraph(joint, recompute, whatever=True)
    least = min_cut(graph)
    if graph.bytes_kept(least) > limit:
        return min(cheap, least, key=graph.bytes_kept)
    return _cheapest(graph, least, limit)


def _cheapest(graph: JointGraph, least: frozenset[relax.Var], limit: float) -> frozenset[relax.Var]:
    """Return the cut of the highest exchange rate that keeps at most ``limit`` bytes."""
    count = len(graph.bound)
    prices = {
        var: cost(graph, var) * (1 + _SLOPE * number / count)
        for number, var in enumerate(graph.bound)
        if var not in graph.early
    }
    low, high = _RATES
    found = least
    for _ in range(_STEPS):
        middle = (low + high) / 2
        repeated = min_cut(graph, prices={v: p * 10**middle for v, p in prices.items()})
        kept = graph.bytes_kept(repeated)
        if kept > limit:
            high = middle
            continue
        low, found = middle, repeated
        if kept >= _CLOSE * limit:
            break
    return found


def predicted(joint: JointModule, repeated: frozenset[relax.Var], budget: float) -> Recomputation:
    """Return what is predicted of backward computing ``repeated`` itself."""
    graph = JointGraph(joint, whatever=True)
    simple = save_all(JointGraph(joint))
    again = (repeated - simple) & graph.forward
    return Recomputation(
        budget,
        graph.bytes_kept(simple),
        graph.bytes_kept(repeated),
        1 + total(graph, again) / max(1, total(graph)),
    )
