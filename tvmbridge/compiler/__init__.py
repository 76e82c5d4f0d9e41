"""From the joint function to loaded code."""
