"""A backend without a GPU, for tests: captures on a CPU behave as on CUDA."""
