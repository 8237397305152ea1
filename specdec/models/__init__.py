"""Models: one decoder for all targets and one EAGLE draft, built of the same layers."""
