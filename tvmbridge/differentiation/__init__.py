"""The joint function of forward and backward, from either source."""
