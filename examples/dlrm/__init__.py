"""A recommendation model that several processes train on generated clicks."""
