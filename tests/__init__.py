"""The test suite; the path of a test file mirrors the path of the code that it tests."""
