"""The compiler: it turns a module into graphs, and the graphs into loaded code."""
