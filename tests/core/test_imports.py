"""Importing the package loads little more than PyTorch and TVM; public names are loaded lazily."""

from __future__ import annotations

import subprocess
import sys

import tvmbridge

HEAVY = (
    "graphviz",
    "networkx",
    "rich",
    "sympy",
    "torch._decomp",
    "torch._dynamo",
    "torch._functorch.aot_autograd",
    "torch._inductor",
    "torch.export",
    "transformers",
)

LOADED = f"""
import sys
import torch, tvm
before = set(sys.modules)
import tvmbridge.core.torch_private
new = set(sys.modules) - before
print(sorted(name for name in {HEAVY!r} if name in new))
"""


def test_importing_the_package_loads_nothing_heavy() -> None:
    command = [sys.executable, "-c", LOADED]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_can_be_imported() -> None:
    assert [name for name in tvmbridge.__all__ if not hasattr(tvmbridge, name)] == []


def test_every_public_name_is_where_the_package_looks_for_it() -> None:
    assert set(tvmbridge._HOME_OF) == set(tvmbridge.__all__)
    assert set(tvmbridge.__all__) <= set(dir(tvmbridge))


def test_other_names_are_missing_as_in_any_module() -> None:
    assert not hasattr(tvmbridge, "no_such_name")
