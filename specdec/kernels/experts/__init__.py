"""Mixtures of experts: a router chooses k of E small MLPs for each row, which adds their results.

A row's result depends on the row, the router and the experts alone, as in linear.py: an expert's
product is a column of the same tensor-core instructions whichever rows share the expert, results
lie by row and slot, and the reader of `Sums` adds a row's slots in their order. There is no
capacity: an expert takes every row that chose it.

To be read in this order: router.py (its product), route.py (who is chosen, and with which weights),
weight.py, mlp.py (the experts' public function, and the twin), products.py (its kernel), mxfp4.py
(weights of four bits), group.py (pairs of row and slot, sorted by expert, for many rows), tiles.py.
"""
