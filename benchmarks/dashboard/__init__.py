"""The models of PyTorch's own compiler dashboard, run by tvmbridge and its peers."""
