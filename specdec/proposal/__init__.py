"""The shape of what is drafted: rows, parents, positions, and the walk of acceptance."""
