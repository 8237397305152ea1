"""Several ranks of one engine, a process each: rank 0 decides, the others do the same."""
