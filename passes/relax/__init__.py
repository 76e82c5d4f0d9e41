"""Passes over TVM Relax modules, each in a file of its own: an IRModule in, an IRModule out."""
