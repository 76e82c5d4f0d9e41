"""The code that runs at each call of a dispatched module: guards, compiled entries, autograd."""
