"""Which tokens min-p, top-k and top-p leave, found without sorting."""
