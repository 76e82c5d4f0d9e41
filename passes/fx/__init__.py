"""Passes over PyTorch's fx graphs, each in a file of its own.

They take and give GraphModules of ATen operators, as ``torch.export.export(...).module()`` makes
them; ``tvmbridge.optimize_fx`` traces a module and runs them.
"""
