"""What is replaced, decomposed or kept opaque while forward is traced; stand-ins of modules."""
