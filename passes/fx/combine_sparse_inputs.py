"""CombineSparseInputs: indices and lengths of N sparse features become one input each, and splits.

    def forward(a_indices, a_lengths, ...):   def forward(indices, lengths, splits):
        f(a_indices, a_lengths)          ->       parts = split_features(indices, splits, order)
                                                  f(parts[0], lengths[0])

Requires: ``features``, or the graph module's meta, says which inputs are features. Guarantees:
every feature is a view of the combined tensors. ``splits``, the number of indices of each feature,
is a host tensor of the batch, so that nothing waits for a device. Runs before HorizontalFusion.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tvmbridge.core.pass_report import PassReport
from tvmbridge.core.torch_private import pytree
from tvmbridge.passes.fx.base import FxPass, evaluated

aten = torch.ops.aten
COMBINED = ("combined_indices", "combined_lengths", "combined_splits", "combined_weights")
#: Keys in the meta of a graph module: its features, and, after the pass, the names of the combined
#: features and of the remaining inputs.
FEATURES, DONE = "tvmbridge_features", "tvmbridge_combined"


@dataclass(frozen=True)
class Feature:
    """A sparse feature of a recommendation model: a list of indices for each row of a batch.

    - ``name``: the name of the feature.
    - ``indices``: the name of the placeholder with the indices of all rows.
    - ``lengths``: the name of the placeholder with the number of indices of each row.
    - ``weights``: the name of the placeholder with a weight for each index; None without weights.
    """

    name: str
    indices: str
    lengths: str
    weights: str | None = None


def split_features(joined: torch.Tensor, splits: torch.Tensor, order: Sequence[int]) -> Any:
    """Split a combined tensor into its features; return views in the ``order`` of the graph.

    ``splits``, a tensor on the host, has the number of elements of each feature.
    """
    parts = joined.split(splits.tolist())
    return [parts[index] for index in order]


def combined_of(parts: Sequence[fx.Node]) -> tuple[fx.Node, fx.Node] | None:
    """Return the combined tensor that ``parts`` are all features of, and its splits.

    None if ``parts`` are no such features, or not in the order of the combined tensor.
    """
    whole = parts[0].args[0] if parts[0].target is operator.getitem else None
    if not isinstance(whole, fx.Node) or whole.target is not split_features:
        return None
    joined, splits, order = whole.args
    places = [order[p.args[1]] for p in parts if p.args[:1] == (whole,)]  # type: ignore[index]
    if places != list(range(len(order))) or len(places) < len(parts):  # type: ignore[arg-type]
        return None
    return joined, splits  # type: ignore[return-value]


@dataclass(frozen=True)
class CombineSparseInputs(FxPass):
    """Replace the inputs of all features by one tensor of indices, of lengths, and of weights.

    After its other inputs, the graph then takes the fields ``indices``, ``lengths``, ``splits``
    and, if there are weights, ``weights`` of a :class:`~.sparse_features.CombinedFeatures`.

    Args:
        features: the features of the graph, in its order; empty: the features in its meta.
        names: the order of the features in the combined tensors; empty: the graph's order.
    """

    features: tuple[Feature, ...] = ()
    names: tuple[str, ...] = ()

    def rewrite(self, graph_module: fx.GraphModule, report: PassReport) -> None:
        """Replace the inputs of the features by the combined inputs."""
        features = self.features or graph_module.meta.get(FEATURES, ())
        if len(features) < 2:
            report.decline("the inputs", "there are no features among them to combine")
            return
        graph = graph_module.graph
        inputs = {node.name: node for node in graph.find_nodes(op="placeholder")}
        reason = _refused(features, inputs, self.names)
        if reason is not None:
            report.decline("the inputs", reason)
            return
        names = self.names or tuple(feature.name for feature in features)
        order = [names.index(feature.name) for feature in features]
        kept = list(inputs)
        weighted = features[0].weights is not None
        combined = _placeholders(graph, list(inputs.values())[-1], weighted)
        first = next(n for n in graph.nodes if n.op != "placeholder")
        with graph.inserting_before(first):
            _hand_back(graph, features, inputs, combined, order)
        gone = {node for f in features for node in (f.indices, f.lengths, f.weights)}
        for name in gone - {None}:
            graph.erase_node(inputs[str(name)])
        _respecify(graph, kept, gone, len(combined))
        graph_module.meta[DONE] = (names, tuple(name for name in kept if name not in gone))
        report.rewrote(len(gone - {None}) - len(combined))


def _refused(features: Sequence[Feature], inputs: dict[str, fx.Node], names: Any) -> str | None:
    for feature in features:
        for name in (feature.indices, feature.lengths, feature.weights):
            if name is not None and name not in inputs:
                return f"feature {feature.name!r}: the graph has no input {name}"
    if len({feature.weights is None for feature in features}) > 1:
        return "some of the features have weights, and others have none"
    if names and set(names) < {feature.name for feature in features}:
        return "the combined tensors lack some of the features"
    for kind in ("indices", "lengths"):
        values = [inputs[getattr(f, kind)].meta.get("val") for f in features]
        if len({getattr(v, "dtype", None) for v in values}) > 1:
            return f"the {kind} of the features have different dtypes"
    return None


def _placeholders(graph: fx.Graph, last: fx.Node, weighted: bool) -> list[fx.Node]:
    made = []
    for name in COMBINED[: 4 if weighted else 3]:
        with graph.inserting_after(last):
            last = graph.placeholder(name)
        made.append(last)
    return made


def _hand_back(
    graph: fx.Graph,
    features: Sequence[Feature],
    inputs: dict[str, fx.Node],
    combined: Sequence[fx.Node],
    order: Sequence[int],
) -> None:
    """Replace each feature's inputs by parts of the combined ones, with the same fake values."""
    indices, lengths, splits, *weights = combined
    parts = {"indices": graph.call_function(split_features, (indices, splits, list(order)))}
    if weights:
        parts["weights"] = graph.call_function(split_features, (weights[0], splits, list(order)))
    for kind, whole in parts.items():
        whole.meta["val"] = [inputs[getattr(f, kind)].meta.get("val") for f in features]
    for number, feature in enumerate(features):
        for kind, whole in parts.items():
            part = graph.call_function(operator.getitem, (whole, number))
            _stand_for(part, inputs[getattr(feature, kind)])
        row = graph.call_function(aten.select.int, (lengths, 0, order[number]))
        _stand_for(row, inputs[feature.lengths])
    example = inputs[features[0].lengths].meta.get("val")
    if isinstance(example, torch.Tensor):
        lengths.meta["val"] = example.new_empty((max(order) + 1, *example.shape))
    if list(order) == list(range(len(features))):
        pieces = [inputs[f.indices] for f in features]
        indices.meta["val"] = evaluated(aten.cat.default, (pieces,), {})


def _stand_for(node: fx.Node, given: fx.Node) -> None:
    node.meta = {k: v for k, v in given.meta.items() if k in ("val", "stack_trace")}
    given.replace_all_uses_with(node)


def _respecify(graph: fx.Graph, kept: Sequence[str], gone: set[Any], count: int) -> None:
    """Change the argument structure of a graph with nested arguments to the new, flat inputs."""
    codegen: Any = graph._codegen
    info = getattr(codegen, "pytree_info", None)
    if info is None:
        return
    flat = [name for name in kept if name not in gone] + list(COMBINED[:count])
    spec = pytree.tree_structure((tuple(flat), {}))
    codegen.pytree_info = type(info)(flat, spec, info.out_spec)
