"""The recipe schema and the recipes that ship with the toolkit."""
