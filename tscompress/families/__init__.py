"""Model families: which one a config belongs to, and what its models consist of."""
