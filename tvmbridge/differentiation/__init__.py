"""Derive the joint function of forward and backward, by TVM's Gradient or PyTorch's autograd."""
