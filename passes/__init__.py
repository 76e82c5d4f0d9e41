"""The graph passes, one a file: ``relax/`` for TVM's graphs, ``fx/`` for PyTorch's.

They lie at the top of the repository and are imported as ``tvmbridge.passes``.
"""

if __name__ != "tvmbridge.passes":
    # A second copy under another name would register every pass's global functions twice.
    raise ImportError(
        f"the passes are not importable as {__name__!r}: import 'tvmbridge.passes' instead, "
        "for example 'from tvmbridge.passes.relax import zapp_like'"
    )
