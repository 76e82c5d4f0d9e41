"""PyTorch's registry accepts the same backend twice, as when two threads look it up at once."""

from __future__ import annotations

import pytest
import torch._dynamo.backends.registry as registry

from tvmbridge.dynamo import tvmbridge


def test_backend_is_registered_again_by_a_thread_that_was_late() -> None:
    found = registry.lookup_backend("tvmbridge")
    assert registry.register_backend(compiler_fn=found, name="tvmbridge") is found


def test_another_backend_of_the_same_name_is_refused() -> None:
    registry.lookup_backend("tvmbridge_eager")
    with pytest.raises(AssertionError, match="duplicate name"):
        registry.register_backend(compiler_fn=tvmbridge, name="tvmbridge_eager")


def test_backends_of_others_are_registered_as_before() -> None:
    def backend_of_a_test(graph: object, inputs: object) -> object:
        return graph

    try:
        assert registry.register_backend(backend_of_a_test) is backend_of_a_test
        assert registry.lookup_backend("backend_of_a_test") is backend_of_a_test
    finally:
        registry._COMPILER_FNS.pop("backend_of_a_test", None)
        registry._BACKENDS.pop("backend_of_a_test", None)
