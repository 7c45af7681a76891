"""Rows of token ids with a loss mask: read, rendered from conversations, generated, packed."""
