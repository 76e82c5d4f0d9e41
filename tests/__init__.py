"""The test suite; the path of a test file mirrors the path of the code that it tests."""

import os

# Harnesses check compiled code, also where the module's own forward is faster.
os.environ.setdefault("TVMBRIDGE_ONLY_IF_FASTER", "0")
