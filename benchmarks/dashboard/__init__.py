"""The models that PyTorch judges its compilers by, through tvmbridge and its peers."""
