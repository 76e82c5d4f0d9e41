"""Conformance: every operator through the whole way of the data, against eager PyTorch.

    python -m tests.conformance --quick
    python -m tests.conformance --dtypes float32 --shard 0/4 --resume
    python -m tests.conformance --dtypes float64 --modes auto relax aot

The samples are those that PyTorch tests its own operators with (OpInfo), and variants of them with
special values, strides, other shapes and dtypes. They run in worker processes, which may crash.
With ``--admit`` unproven converters and gradient rules are tried too, and those that are right are
entered into ``tvmbridge/core/admitted.json``.
"""
