"""Checkpoint layouts in and out, and what is wrong with a drafter directory."""
