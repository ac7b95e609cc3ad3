"""From a recipe to a result: read the recipe, compress, save, run and sweep."""
