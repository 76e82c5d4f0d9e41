"""Mistakes planted in the package on purpose, to show that the test suite catches them.

A *plant* replaces one piece of a module's source when the module is imported. No file is changed.
"""
