"""Full garbage collections that a compilation puts off."""

from __future__ import annotations

import gc

from tvmbridge.core.collection import full_collections_put_off


def test_thresholds_are_put_back_after_the_outermost_context() -> None:
    before = gc.get_threshold()
    with full_collections_put_off():
        assert gc.get_threshold()[:2] == before[:2]
        assert gc.get_threshold()[2] > 1000
        with full_collections_put_off():
            pass
        assert gc.get_threshold()[2] > 1000
    assert gc.get_threshold() == before


def test_thresholds_that_others_set_meanwhile_stay() -> None:
    before = gc.get_threshold()
    try:
        with full_collections_put_off():
            gc.set_threshold(500, 5, 5)
        assert gc.get_threshold() == (500, 5, 5)
    finally:
        gc.set_threshold(*before)
