"""Replace, decompose or keep opaque functions during a trace of forward; stand-ins of modules."""
