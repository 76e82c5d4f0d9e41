"""The graph passes, one a file: ``relax/`` for TVM's graphs, ``fx/`` for PyTorch's.

The folder is at the top of the repository and is imported as ``tvmbridge.passes``.
"""

if __name__ != "tvmbridge.passes":
    # A second import under another name would register every pass's global functions twice.
    raise ImportError(
        f"the passes are not importable as {__name__!r}: import 'tvmbridge.passes' instead, "
        "for example 'from tvmbridge.passes.relax import zapp_like'"
    )
