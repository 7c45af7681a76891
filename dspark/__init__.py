"""DSpark: DFlash with a sequential head, a confidence head and load-aware verification."""
