"""Graph passes in eager PyTorch: capture a module's forward as an fx graph, and rewrite it."""
