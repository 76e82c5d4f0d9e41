"""What every other folder may import: data types, errors, options."""
