"""Training scripts as the documentation of well-known libraries shows them, with one line added."""
