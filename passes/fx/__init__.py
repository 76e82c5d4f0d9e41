"""Passes over PyTorch's fx graphs, each in a file of its own.

A pass takes and returns a GraphModule of ATen operators, as ``torch.export.export(...).module()``
creates it. ``tvmbridge.optimize_fx`` traces a module and runs the passes.
"""
