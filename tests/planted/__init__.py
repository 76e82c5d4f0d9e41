"""Mistakes planted on purpose, to show that the suite catches them."""
