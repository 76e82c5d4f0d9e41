"""Graph passes in eager PyTorch: a module's forward as an fx graph, rewritten and run as it is."""
