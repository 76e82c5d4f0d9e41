"""Timelines as SVG pictures."""

from __future__ import annotations

import xml.etree.ElementTree as tree

from tvmbridge.distributed.drawing import draw_timelines
from tvmbridge.distributed.orders import Durations, orders, predict

SVG = "{http://www.w3.org/2000/svg}"


def test_a_picture_has_a_box_for_each_piece_of_work() -> None:
    simple = predict(orders("simple", 2, 2, 4), [Durations(0.1, 0.2)] * 2)
    other = predict(orders("interleaved", 4, 2, 4), [Durations(0.1, 0.2)] * 4)
    picture = tree.fromstring(draw_timelines({"predicted <2>": simple, "measured": other}))
    texts = [node.text or "" for node in picture.iter(f"{SVG}text")]
    assert texts[0] == "predicted <2>: 1500.0 ms, idle share 0.200"
    assert texts.count("device 1") == 2
    titles = [node.text or "" for node in picture.iter(f"{SVG}title")]
    assert len(titles) == 2 * 8 + 4 * 8
    assert titles[0] == "F0.0: 100.00 ms"
    boxes = [b for b in picture.iter(f"{SVG}rect") if b.find(f"{SVG}title") is not None]
    left, right = (float(boxes[0].get(k) or 0) for k in ("x", "width"))
    # 0.1 of 1.5 seconds on 886 points, to the right of the names.
    assert (left, round(right, 1)) == (74.0, 59.1)
    assert {b.get("fill") for b in boxes[16:]} == {"#9ecae1", "#6baed6", "#fdae6b", "#fd8d3c"}
