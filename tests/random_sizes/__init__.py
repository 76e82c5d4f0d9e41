"""Random sequences of sizes: models called at sizes that change, held against eager PyTorch."""
