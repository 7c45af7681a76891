"""Speculative decoding as one readable loop, its acceptance metrics and reports."""
