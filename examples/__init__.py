"""Training scripts from the documentation of well-known libraries, with one line added to each."""
