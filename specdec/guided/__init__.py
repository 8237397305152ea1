"""Structured output: what a grammar allows after each row that is decided. No torch."""
