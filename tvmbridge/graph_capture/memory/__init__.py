"""Memory: outputs that alias inputs or one another, and their strides."""
