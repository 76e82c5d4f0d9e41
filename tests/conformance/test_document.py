"""The generated page of operators, and the list of the most used operators."""

from __future__ import annotations

from tests.conformance.document import DOCUMENT, document, read_results
from tests.conformance.table import CLASSES
from tests.conformance.usage import COUNT, is_native, most_used, read_usage


def test_the_page_is_the_generated_one() -> None:
    """If this fails, run ``python -m tests.conformance --write-docs``."""
    assert DOCUMENT.read_text(encoding="utf-8") == document(read_results())


def test_no_result_is_wrong() -> None:
    for names in read_results().results.values():
        words = {value.split()[0] for value in names.values()}
        assert words <= {"native", "mixed", "aten_call", "refused"}
        assert words <= set(CLASSES)


def test_operators_most_used() -> None:
    listed = most_used(read_usage())
    assert len(listed) == len(set(listed)) == COUNT
    assert is_native("aten.add.Tensor")
    assert is_native("aten.arange.start_step")
    assert not is_native("aten.nonzero.default")
