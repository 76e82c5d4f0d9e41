"""What the bridge knows of other libraries; none of them is imported, or needed, for it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from typing import Any

from torch import nn

from tvmbridge.core.contents import is_constant
from tvmbridge.core.torch_private import pytree

_COLLECTOR = "transformers.utils.output_capturing"
# Dictionaries of tensors with more attributes, by their modules.
_BATCHES = (
    ("transformers.tokenization_utils_base", "BatchEncoding"),
    ("transformers.feature_extraction_utils", "BatchFeature"),
)
# Modules whose globals are books about models, and no part of what these compute.
KEEPS_BOOKS = "transformers.utils."
# Its models skip checks where they are compiled, and compute the same.
SAME_WHEN_COMPILED = "transformers."
# Attributes that say nothing of results: that hooks are installed, and which weights of a recurrent
# layer PyTorch has laid side by side (the weights themselves are inputs).
BOOKKEEPING = frozenset({"_output_capturing_hooks_installed", "_flat_weight_refs"})


def register_containers(module: nn.Module) -> None:
    """Let PyTorch see into what transformers' models take: its batches and caches become pytrees.

    Without effect where the library is not imported. Caches are those of ``module``'s models, where
    the library is new enough to do it itself.
    """
    _register_batches()
    library = sys.modules.get("transformers.modeling_utils")
    if library is None:
        return
    for model in module.modules():
        if isinstance(model, library.PreTrainedModel):
            try:
                exporter = importlib.import_module("transformers.exporters.exporter_dynamo")
            except ImportError:
                return
            exporter.register_cache_pytrees_for_model(model)


class _Unseen:
    """Stands, in a trace and in what it returns, for what a batch knows beside its tensors.

    Raises:
        AttributeError, TypeError: it is used.
    """

    def __reduce__(self) -> str:
        return "UNSEEN"  # copies are the one


UNSEEN = _Unseen()


def _register_batches() -> None:
    """Batches are those of tokenizers and processors.

    The numbers and strings that a batch has as attributes are part of its structure. The rest, the
    tokenizer's own account of the text, differs from batch to batch: forward finds :data:`UNSEEN`.
    """
    for module, name in _BATCHES:
        kind = getattr(sys.modules.get(module), name, None)
        if kind is not None and kind not in pytree.SUPPORTED_NODES:
            pytree.register_pytree_node(
                kind,
                _flatten_batch,
                _unflatten_batch,
                flatten_with_keys_fn=_flatten_batch_with_keys,
                serialized_type_name=f"{module}.{name}",
            )


def _flatten_batch(batch: Any) -> tuple[list[Any], Any]:
    attributes = {k: v for k, v in vars(batch).items() if k != "data"}
    seen = {k: v if is_constant(v) else UNSEEN for k, v in attributes.items()}
    return list(batch.data.values()), (type(batch), tuple(batch.data), tuple(seen.items()))


def _flatten_batch_with_keys(batch: Any) -> tuple[list[Any], Any]:
    values, context = _flatten_batch(batch)
    return [(pytree.MappingKey(k), v) for k, v in zip(context[1], values, strict=True)], context


def _unflatten_batch(values: Iterable[Any], context: Any) -> Any:
    kind, keys, attributes = context
    batch = object.__new__(kind)
    vars(batch).update(data=dict(zip(keys, values, strict=True)), **dict(attributes))
    return batch


def acts(hooks: Iterable[Any]) -> bool:
    """Whether any of a module's hooks does something in the present context.

    transformers installs hooks, for good, the first time that hidden states or attentions are
    asked for. They do nothing unless a model that is being called collects what they see; where
    the collecting model is the captured one, the captured graph has all of it.
    """
    for hook in hooks:
        if getattr(hook, "__module__", None) != _COLLECTOR:
            return True
        collector = getattr(sys.modules.get(_COLLECTOR), "_active_collector", None)
        if collector is None or collector.get() is not None:
            return True
    return False
