"""Conformance: run every operator from capture to compiled code, and compare with eager PyTorch.

    python -m tests.conformance --quick
    python -m tests.conformance --dtypes float32 --shard 0/4 --resume
    python -m tests.conformance --dtypes float64 --modes auto relax aot

The samples come from PyTorch's own operator tests (OpInfo), with variants that have special
values, strides, other shapes or other dtypes. Worker processes run the samples, since a sample may
crash. ``--admit`` also tries unproven converters and gradient rules, and enters the ones that are
right into ``tvmbridge/core/admitted.json``.
"""
