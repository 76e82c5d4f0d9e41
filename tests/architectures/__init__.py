"""Run and train small models of the transformers library through TVM, and compare with eager."""
