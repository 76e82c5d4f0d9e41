"""Passes over TVM Relax modules, each an IRModule to IRModule rewrite in a file of its own."""
