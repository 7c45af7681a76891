"""Serving a target with a drafter: recipes, the engine's command line, its checks, the start."""
