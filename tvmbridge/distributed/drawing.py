"""Timelines as SVG pictures: what each device does when, predicted above measured."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from tvmbridge.distributed.orders import Span, Timeline

_WIDTH, _ROW, _GAP, _LEFT = 960.0, 26.0, 16.0, 74.0
_CAPTION = 22.0
# Colors of forward and backward, one shade for each stage of a device.
_COLORS = {
    "F": ("#9ecae1", "#6baed6", "#4292c6", "#2171b5"),
    "B": ("#fdae6b", "#fd8d3c", "#f16913", "#d94801"),
    "I": ("#fdae6b", "#fd8d3c", "#f16913", "#d94801"),
    "W": ("#a1d99b", "#74c476", "#41ab5d", "#238b45"),
}
# Boxes narrower than this have no text.
_LEAST_TEXT = 18.0


def draw_timelines(timelines: Mapping[str, Timeline]) -> str:
    """Draw timelines as one SVG picture, one above the other, with their names and idle shares.

    A box is a piece of work: F3 is the forward of micro-batch 3 and B3 its backward. I3 and W3
    are the gradients of inputs and of weights, if the schedule computes them separately. Later
    stages of a device are darker.
    """
    parts: list[str] = []
    top = 0.0
    for name, timeline in timelines.items():
        height = _drawn(parts, name, timeline, top)
        top += height + _GAP
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH:g} {top:g}" '
        f'width="100%" font-family="Helvetica" font-size="11">\n{body}\n</svg>\n'
    )


def _drawn(parts: list[str], name: str, timeline: Timeline, top: float) -> float:
    caption = f"{name}: {1e3 * timeline.seconds:.1f} ms, idle share {timeline.idle:.3f}"
    parts.append(f'<text x="0" y="{top + 14:g}" font-size="13">{escape(caption)}</text>')
    begin = min(s.start for rank in timeline.spans for s in rank)
    scale = (_WIDTH - _LEFT) / timeline.seconds
    for rank, spans in enumerate(timeline.spans):
        y = top + _CAPTION + rank * (_ROW + 2)
        parts.append(f'<text x="0" y="{y + 17:g}">device {rank}</text>')
        parts.append(
            f'<rect x="{_LEFT:g}" y="{y:g}" width="{_WIDTH - _LEFT:g}" height="{_ROW:g}" '
            'fill="#f2f2f2"/>'
        )
        shades = {stage: i for i, stage in enumerate(sorted({s.work.stage for s in spans}))}
        for span in spans:
            parts.append(_box(span, shades[span.work.stage], begin, scale, y))
    return _CAPTION + len(timeline.spans) * (_ROW + 2)


def _box(span: Span, shade: int, begin: float, scale: float, y: float) -> str:
    colors = _COLORS[span.work.kind]
    color = colors[min(shade, len(colors) - 1)]
    x = _LEFT + (span.start - begin) * scale
    width = max((span.end - span.start) * scale, 0.5)
    title = f"{span.work}: {1e3 * (span.end - span.start):.2f} ms"
    box = (
        f'<rect x="{x:.1f}" y="{y:g}" width="{width:.1f}" height="{_ROW:g}" fill="{color}" '
        f'stroke="white"><title>{title}</title></rect>'
    )
    if width < _LEAST_TEXT:
        return box
    text = f"{span.work.kind}{span.work.microbatch}"
    return f'{box}<text x="{x + width / 2:.1f}" y="{y + 17:g}" text-anchor="middle">{text}</text>'
