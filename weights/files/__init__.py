"""Files from strangers, read within bounds."""
