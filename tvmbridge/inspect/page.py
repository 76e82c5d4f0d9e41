"""Write a picture as an interactive HTML page, which Graphviz lays out in the browser.

The package easydot provides Graphviz compiled to WebAssembly, which is embedded in the page. So
the page needs no server, no network, and no program ``dot``.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Collection, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import graphviz
import tvm
from tvm import relax

from tvmbridge.coloring import Coloring
from tvmbridge.core.errors import BridgeError
from tvmbridge.inspect.picture import Frame, Node, Picture
from tvmbridge.inspect.styles import EDGE, GRAPH, NODE
from tvmbridge.inspect.visualize import picture_of

_PACKAGE = "easydot"
_MODULE = "assets/index.js"
_PLACE = re.compile(r"@([A-Z]+)@")


def visualize_html(
    mod_or_function: tvm.IRModule | relax.Function,
    *,
    collapse_small: bool = True,
    coloring: Coloring | None = None,
    title: str = "",
    seconds: Mapping[relax.Var, float] | None = None,
) -> str:
    """Return the picture of :func:`tvmbridge.visualize` as the text of an HTML page.

    The page pans, zooms and searches. Submodules fold and unfold, and a click on a value shows its
    type, bytes, submodule and source line. A large picture begins with folded submodules.

    Args:
        mod_or_function: a ``relax.Function``, or an ``IRModule`` that holds at least one.
        collapse_small: whether small values are written inside the nodes that use them.
        coloring: the coloring of a joint function.
        title: the title of the page.
        seconds: for each variable whose time was measured, the seconds that its call takes.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: the module has no Relax function.
        BridgeError: the package that brings Graphviz for browsers is not installed.
    """
    drawn = picture_of(
        mod_or_function, collapse_small=collapse_small, coloring=coloring, seconds=seconds or {}
    )
    return page(drawn, title)


def page(drawn: Picture, title: str = "", folded: Collection[str] | None = None) -> str:
    """Return a picture as the text of an HTML page.

    Args:
        folded: the names of the groups that are folded at first; None: as many as make the
            picture readable.

    Raises:
        BridgeError: the package that brings Graphviz for browsers is not installed.
    """
    parts = {
        "TITLE": json.dumps(title or drawn.title or "tvmbridge"),
        "DATA": json.dumps(_data(drawn, folded), separators=(",", ":")),
        "GRAPHVIZ": json.dumps(_graphviz().read_text(encoding="utf-8")),
    }
    # HTML ends or changes a script at "</script" and "<!--<script" even inside a string.
    parts = {name: text.replace("<", "\\u003c") for name, text in parts.items()}
    parts |= {
        "STYLE": _resource("page.css"),
        "SCRIPT": _resource("page.js") + _resource("page_facts.js"),
    }
    # A single substitution, because an inserted text may contain a placeholder itself.
    return _PLACE.sub(lambda place: parts[place[1]], _resource("page.html"))


def missing_package() -> str | None:
    """Return what the user must install before pages can be written; None if nothing is missing."""
    if _module_path() is not None:
        return None
    return "pages need easydot: pip install 'tvmbridge[draw]', with Python 3.11 or newer"


def _graphviz() -> Path:
    path = _module_path()
    if path is None:
        raise BridgeError(missing_package())
    return path


def _module_path() -> Path | None:
    """Return the path of Graphviz's WebAssembly build, without importing its package; or None."""
    spec = importlib.util.find_spec(_PACKAGE)
    path = None if spec is None or spec.origin is None else Path(spec.origin).parent / _MODULE
    return path if path is not None and path.is_file() else None


def _resource(name: str) -> str:
    return resources.files("tvmbridge.inspect").joinpath(name).read_text(encoding="utf-8")


def _data(drawn: Picture, at_first: Collection[str] | None) -> dict[str, Any]:
    """Return the data of the page: each part as a statement of dot, with the facts about it."""
    submodules = [g for g in drawn.groups.values() if g.depth]
    folded = {n.name: n for n in drawn.folded_nodes([g.name for g in submodules])}
    return {
        "head": _head(),
        "title": drawn.title,
        "nodes": [_node(node) for node in drawn.nodes],
        "edges": [[e.source, e.target, e.head or ""] for e in drawn.edges],
        "groups": {
            g.name: {**_group(g), "node": _node(folded[g.name]) if g.depth else None}
            for g in drawn.groups.values()
        },
        "folded": sorted(drawn.readable() if at_first is None else at_first),
        "legend": list(drawn.legend),
    }


def _node(node: Node) -> dict[str, Any]:
    statement = graphviz.Digraph()
    texts = {"label": node.label, "tooltip": graphviz.escape(node.tooltip)}
    statement.node(node.name, **{**texts, **node.attributes})
    return {
        "name": node.name,
        "dot": "".join(statement.body),
        "kind": node.kind,
        "groups": node.groups,
        "facts": dict(node.facts),
    }


def _group(group: Frame) -> dict[str, Any]:
    statement = graphviz.Digraph()
    statement.attr(label=group.text, **group.attributes)
    return {"dot": "".join(statement.body), "path": group.path, "depth": group.depth}


def _head() -> str:
    statement = graphviz.Digraph(graph_attr=GRAPH, node_attr=NODE, edge_attr=EDGE)
    return "".join(list(statement)[1:-1])
