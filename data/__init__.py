"""Conversations, prompts and regenerated answers to token ids with a loss mask, packed."""
