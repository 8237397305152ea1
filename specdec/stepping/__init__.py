"""What a step works on: its sizes, buffers, state rows, and the acts that are kernels of their own."""
