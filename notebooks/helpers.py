"""What the notebooks share: pictures in the page, timings in turns, and the quick setting."""

import logging
import os
import re
import statistics
import time
import warnings

import graphviz
import torch

#: The tests run the notebooks with smaller sizes and fewer trials.
QUICK = bool(os.environ.get("TVMBRIDGE_NOTEBOOK_QUICK"))

warnings.simplefilter("ignore")  # of torch.export and transformers about their own parts
logging.getLogger("transformers").setLevel(logging.ERROR)
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))


class Picture:
    """A graph that a notebook shows as SVG."""

    def __init__(self, svg):
        self.svg = svg

    def _repr_svg_(self):
        return self.svg

    def __repr__(self):
        return "a picture; see the notebook"


def show(graph, width="100%"):
    """``graph`` as a small SVG picture; without graphviz' program `dot` a message says so."""
    try:
        svg = graph.pipe(format="svg", encoding="utf-8")
    except graphviz.ExecutableNotFound:
        print("No picture: graphviz' program `dot` is not installed.")
        return None
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<!--.*?-->\n?|<title>.*?</title>\n?|</?a\b[^>]*>\n?", "", svg, flags=re.S)
    svg = svg.replace(' font-family="Helvetica,sans-Serif"', "")
    svg = re.sub(r' width="[^"]*" height="[^"]*"', "", svg, count=1)
    return Picture(svg.replace("<svg", f'<svg width="{width}" font-family="Helvetica"', 1))


def medians(**functions):
    """Milliseconds of each function, called in turns: the median of 30 calls, 5 when quick."""
    seconds = {name: [] for name in functions}
    for round_ in range((5 if QUICK else 30) + 3):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            if round_ >= 3:
                seconds[name].append(time.perf_counter() - start)
    return {name: 1e3 * statistics.median(values) for name, values in seconds.items()}
