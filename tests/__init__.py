"""The test suite; the files mirror the paths of what they test."""
