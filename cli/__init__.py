"""The `spec` command: thin verbs with lazy imports."""
