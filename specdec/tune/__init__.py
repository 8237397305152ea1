"""Measures which tiles read a model's weights fastest: `specdec tune`, and the shipped table."""
