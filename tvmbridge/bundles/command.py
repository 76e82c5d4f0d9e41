"""The command `cache`: list, clear, export and import compiled code."""

from __future__ import annotations

import argparse
from typing import Any

from torch import nn

from tvmbridge.bundles import save_compiled
from tvmbridge.cache import Store
from tvmbridge.cache.exchange import BundleReport, export_bundle, import_bundle
from tvmbridge.dispatch import add_tvm_dispatch
from tvmbridge.kernels.table import clear_tables


def run(known: argparse.Namespace, model: tuple[nn.Module, Any] | None) -> None:
    """Run the command ``cache`` and print the result.

    Args:
        model: a module and its sample input, whose code is exported; None exports the whole cache.
    """
    store = Store.of_now()
    if known.export is not None:
        print(_exported(known, model))
    elif known.import_ is not None:
        print(import_bundle(known.import_))
    elif known.clear:
        count = store.clear() + clear_tables(store.folder)
        print(f"removed {count} files from {store.folder}")
    elif known.size:
        print(f"{store.size()} bytes of at most {store.most} in {store.folder}")
    else:
        _list(store)


def _exported(known: argparse.Namespace, model: tuple[nn.Module, Any] | None) -> BundleReport:
    if model is None:
        return export_bundle(known.export)
    module, sample = model
    add_tvm_dispatch(module, sample)
    return save_compiled(module, known.export)


def _list(store: Store) -> None:
    entries = dict(store.keys())
    for path, status in store.files():
        key = entries.get(path)
        what = "" if key is None else "plan" if "plan" in key else key.get("graph", "")[:12]
        about = "damaged" if key is None else f"{key.get('target')} {what}"
        print(f"{path.name} {status.st_size} {about}")
