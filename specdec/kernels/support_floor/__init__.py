"""Which tokens min-p, top-k and top-p leave, found without sorting.

To be read in this order: floor.py, what is asked and the launches; units.py, what a logit is to
them; then the three kernels, bins.py, gather.py and search.py.
"""
