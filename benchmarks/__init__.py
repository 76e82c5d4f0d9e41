"""Measurements of tvmbridge beside its peers."""

import os

# Compiled code is measured, also where the module's own forward is faster.
os.environ.setdefault("TVMBRIDGE_ONLY_IF_FASTER", "0")
