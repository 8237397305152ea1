"""Structured output: the tokens that a grammar allows after each decided row. No torch."""
