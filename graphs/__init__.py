"""Capture and replay of torch callables: breakable and full CUDA graphs, and a CPU tape that behaves the same."""
