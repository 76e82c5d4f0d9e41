"""Stress tests of interrupts: a signal handler raises many times while compiled code runs."""
