"""Support for other libraries, such as transformers; none of them is required or imported here."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from typing import Any

from torch import nn

from tvmbridge.core.contents import is_constant
from tvmbridge.core.torch_private import pytree

_COLLECTOR = "transformers.utils.output_capturing"
# Classes of batches: dictionaries of tensors with further attributes.
_BATCHES = (
    ("transformers.tokenization_utils_base", "BatchEncoding"),
    ("transformers.feature_extraction_utils", "BatchFeature"),
)
# Modules whose globals hold registry state; no model computes with it.
KEEPS_BOOKS = "transformers.utils."
# Models of this library skip checks when they are compiled, and compute the same results.
SAME_WHEN_COMPILED = "transformers."
# Attributes that do not affect results: whether hooks are installed, and PyTorch's references to
# the flattened weights of a recurrent layer (the weights themselves are inputs).
BOOKKEEPING = frozenset({"_output_capturing_hooks_installed", "_flat_weight_refs"})


def register_containers(module: nn.Module) -> None:
    """Register the batches and caches of transformers as pytrees, so PyTorch can flatten them.

    This has no effect if transformers is not imported. Caches are registered for the transformers
    models inside ``module``, by a function of transformers that old releases lack.
    """
    register_batches()
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
    """Placeholder, in a trace and in its results, for attributes of a batch that may vary.

    Raises:
        AttributeError, TypeError: forward uses the placeholder.
    """

    def __reduce__(self) -> str:
        return "UNSEEN"  # so that a copy is the same object


UNSEEN = _Unseen()


def register_batches() -> bool:
    """Register the batches that tokenizers and processors return as pytrees.

    Return whether there was one to register: their classes may be imported at any time.

    Numbers and strings that a batch has as attributes become part of the pytree structure. The
    other attributes, such as the tokenizer's encodings, differ from batch to batch, so forward
    gets :data:`UNSEEN` for each of them.
    """
    registered = False
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
            registered = True
    return registered


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
    """Whether any of a module's hooks has an effect in the present context.

    transformers installs permanent hooks when hidden states or attentions are first requested.
    The hooks have an effect only while a running model collects these results. If that model is
    itself captured, the captured graph contains the results.
    """
    for hook in hooks:
        if getattr(hook, "__module__", None) != _COLLECTOR:
            return True
        collector = getattr(sys.modules.get(_COLLECTOR), "_active_collector", None)
        if collector is None or collector.get() is not None:
            return True
    return False
