"""Call models at random sequences of sizes through TVM, and compare with eager PyTorch."""
