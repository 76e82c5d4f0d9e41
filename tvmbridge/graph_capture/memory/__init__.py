"""Memory: describe outputs that alias inputs or one another, and the strides of outputs."""
