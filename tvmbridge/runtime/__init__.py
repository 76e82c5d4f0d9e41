"""What runs at a call: guards, compiled entries, autograd."""
