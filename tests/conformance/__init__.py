"""Conformance: every operator through the whole way of the data, against eager PyTorch.

    python -m tests.conformance --quick
    python -m tests.conformance --dtypes float32 --shard 0/4 --resume

The samples are those that PyTorch tests its own operators with (OpInfo), and variants of them with
special values and with strides. They run in worker processes, which may crash.
"""
