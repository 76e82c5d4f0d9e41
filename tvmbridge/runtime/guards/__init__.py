"""What compiled code assumes, compared at each call with what is."""
