"""Data types, errors and options, which every other package of tvmbridge may import."""
