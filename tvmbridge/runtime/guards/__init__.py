"""Guards: at each call they check the assumptions that compiled code was captured under."""
