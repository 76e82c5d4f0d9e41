"""Memory: outputs that share it, the order in which tensors lie, weights side by side."""
