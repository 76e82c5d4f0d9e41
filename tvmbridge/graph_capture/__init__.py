"""Capture a module and a sample as a CapturedGraph."""
