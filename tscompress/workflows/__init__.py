"""A recipe in, a result out: read the recipe, compress, save, run and sweep."""
