"""What decides which request computes what in the next step. No torch."""
