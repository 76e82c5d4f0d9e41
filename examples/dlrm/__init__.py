"""A recommendation model, trained on several processes on clicks of a seeded generator."""
