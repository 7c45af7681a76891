"""The frozen model: load it, capture its context features, generate with it, tell what it is."""
