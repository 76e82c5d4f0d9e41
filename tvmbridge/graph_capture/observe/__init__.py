"""Forward on fake tensors, before it is captured: what it reads, writes and returns."""
