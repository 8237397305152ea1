"""Products of 8-bit floats (e4m3): codes with scales, of W by its rows and of x by its rows.

Two published forms. Channel: a scale for each row of W and each row of x. Block: a scale for each
128 of K besides; those of W are shared by 128 rows on disk, and every row has its own here. A row's
scales follow from the row alone, so a result depends on the row and the weight only.

A sum has one order in both forms: each 128 of K begins a fresh float32 accumulator of the tensor
cores, which keep about 14 bits of a longer one, and it is added to the sum so far. Splits of K are
added in pairs as sum_order.py says, each scaled before.

To be read in this order: weight.py (the values), quantise.py (codes of x), sums.py (the order),
products.py (public functions, and their twins), promote.py (the order in few_rows.py and
persistent/, which do the work on Hopper GPUs), norms.py (norms that leave codes).
"""
