"""The tokens that min-p, top-k and top-p leave, found without sorting.

To be read in this order: floor.py, what is asked and the launches; units.py, a logit's value, key,
mass and bin; then the three kernels, bins.py, gather.py and search.py.
"""
