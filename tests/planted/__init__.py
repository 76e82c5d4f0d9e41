"""Mistakes planted in the package on purpose, to show that the test suite catches them.

A *plant* changes one piece of a module's source when the module is imported. The files stay as they
are.
"""
