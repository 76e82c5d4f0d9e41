"""From a module and a sample to a CapturedGraph."""
