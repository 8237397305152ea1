"""What a step works on: sizes, buffers, state rows, and the acts that are kernels of their own."""
