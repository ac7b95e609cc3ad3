"""What the papers state, as functions and small models: bounds, constructions, estimators."""
