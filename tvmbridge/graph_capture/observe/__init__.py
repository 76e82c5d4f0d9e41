"""Run forward on fake tensors before the capture, and record what it reads, writes and returns."""
