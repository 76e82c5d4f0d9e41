"""Mistakes in the cache on disk and in bundles."""

from __future__ import annotations

from tests.planted.plant import Plant

CACHES = (
    Plant(
        "kernels of another GPU's architecture",
        "guard",
        "tvmbridge.compiler.cached_build",
        '"device": backend_for(self.target).identity(self.device),',
        '"device": self.device.type,',
        ("tests/cache/test_gpu_code.py", "-k", "asks_the_cache"),
    ),
    Plant(
        "a bundle's code for another processor",
        "guard",
        "tvmbridge.cache.exchange",
        "if other != value:",
        "if False:",
        ("tests/cache/test_bundle.py", "-k", "does_not_fit"),
    ),
    Plant(
        "a plan binds whatever it says",
        "guard",
        "tvmbridge.compiler.cached_build",
        "        compiled_of = {**compiled_of, BOUND: self.bound}\n",
        "",
        ("tests/recall/test_damaged_plans.py", "-k", "forged"),
        quick=True,
    ),
    Plant(
        "a plan that forgets which buffers results depend on",
        "guard",
        "tvmbridge.recall.binding",
        "read=plan.read,",
        "read=frozenset(),",
        ("tests/recall/test_recalled_training.py", "-k", "second_derivatives"),
    ),
    Plant(
        "a plan for other code of a helper function",
        "guard",
        "tvmbridge.recall.facts",
        "if _named(walked) != facts.named:",
        "if False:",
        ("tests/recall/test_recall.py", "-k", "globals_are_read or torch.relu or a_global"),
    ),
    Plant(
        "a plan for other values of attributes",
        "guard",
        "tvmbridge.recall.facts",
        "if of_values != facts.digests[0]:",
        "if False:",
        ("tests/recall/test_recall.py", "-k", "another_state"),
    ),
)
