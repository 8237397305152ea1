"""Models: one Llama-family target and one EAGLE draft, built of the same layers."""
