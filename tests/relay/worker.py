"""Run Relay texts: a script for an interpreter that has a TVM with Relay, and NumPy alone.

It answers each line of JSON with a line: it parses the text, checks its types, builds it with LLVM,
runs it, and writes the results to a file.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import numpy as np

logging.disable(logging.WARNING)


def parse(text: str) -> Any:
    """Return the module, with its types inferred."""
    import tvm
    from tvm import relay

    fromtext = getattr(relay, "fromtext", None) or tvm.parser.fromtext
    return relay.transform.InferType()(fromtext(text))


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Do what one request asks for: ``{"text", "arrays", "results", "level"}``."""
    import tvm
    from tvm import relay
    from tvm.contrib import graph_executor

    with open(request["text"], encoding="utf-8") as file:
        mod = parse(file.read())
    if not request.get("results"):
        return {"ok": True}
    arrays = dict(np.load(request["arrays"]))
    inputs = {n.removeprefix("input:"): a for n, a in arrays.items() if n.startswith("input:")}
    params = {n.removeprefix("param:"): a for n, a in arrays.items() if n.startswith("param:")}
    with tvm.transform.PassContext(opt_level=request["level"]):
        library = relay.build(mod, target="llvm", params=params)
    executor = graph_executor.GraphModule(library["default"](tvm.cpu()))
    executor.set_input(**{n: tvm.nd.array(a) for n, a in inputs.items()})
    executor.run()
    results = [executor.get_output(i).numpy() for i in range(executor.get_num_outputs())]
    np.savez(request["results"], *results)
    return {"ok": True}


def main() -> None:
    """Answer requests until standard input ends."""
    for line in sys.stdin:
        try:
            answer = run(json.loads(line))
        except Exception as error:
            answer = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
