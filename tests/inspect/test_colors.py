"""The picture of a colored joint function: all colors, and the user's options over them."""

from __future__ import annotations

from tests.models import transformer_joint
from tvmbridge.coloring import color
from tvmbridge.inspect import visualize
from tvmbridge.inspect.visualize import BACKWARD, FORWARD, REPEATED, RESIDUAL, node_colors


def test_each_variable_has_the_color_of_its_part() -> None:
    coloring = color(transformer_joint().joint, "min_cut")
    colors = node_colors(coloring)
    both = coloring.repeated
    assert both
    for binding in coloring.forward:
        if binding.var in coloring.residuals:
            assert colors[binding.var] == RESIDUAL
        else:
            assert colors[binding.var] == (REPEATED if binding.var in both else FORWARD)
    own = [b.var for b in coloring.backward if b.var not in both]
    assert all(colors[v] == BACKWARD for v in own)


def test_the_drawing_shows_them() -> None:
    joint = transformer_joint().joint
    coloring = color(joint, "min_cut")
    source = visualize(joint.mod["joint"], coloring=coloring).source
    for shown in (FORWARD, RESIDUAL, BACKWARD, REPEATED):
        assert shown["fillcolor"] in source


def test_attributes_of_the_user_go_before() -> None:
    joint = transformer_joint().joint
    coloring = color(joint, "min_cut")
    var = coloring.residuals[0]
    asked = {var: {"fillcolor": "#123456"}}
    source = visualize(joint.mod["joint"], coloring=coloring, node_attr_dict=asked).source
    assert "#123456" in source
