"""Storms of interrupts: signal handlers that raise while compiled code runs."""
