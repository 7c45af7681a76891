"""The frozen target model: load it, read its features, say what it is."""
