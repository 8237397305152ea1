"""Causal attention over a paged cache, in tiles and splits whose borders are absolute positions.

A row at position p reads keys 0..p of its request: tiles of 64 keys inside a split by online
softmax (arXiv 2112.05682), then the splits one after another by the same rule. Borders do not
depend on the other rows of the step, so neither does the row's result: a tile beyond a row's
position multiplies by 1 and adds 0. Values of keys beyond a tile's last row are read as 0, because
0 x NaN is NaN and unwritten slots may hold anything.

Splits are 64 keys up to position 1,024, then 128 up to 4,096, 256 up to 8,192, and 512: short
contexts spread over the GPU, long ones leave few partial results. In a round of few requests
programs share the splits of query tiles and a second kernel adds them up; in a prefill chunk, and
where the query tiles alone fill the GPU, one program walks all splits and writes no partial result.
There a round leaves the slots of more than ALONE_KEYS keys to two others beside it: one shares
their splits, and the next adds them up; without such slots both end at once. All use the same
functions for a tile of keys and for adding a split. Maxima are exact and totals come from the
tensor cores like the values, so nothing depends on how a tile lies across threads: a row gets the
same bits every way. That holds for query tiles of 64 rows and more too, which take wgmma:
tests/specdec/kernels/test_query_tiles.py asks a GPU.

A row with a window sees the last `window` keys up to its own. A tile of keys is read if some row of
the query tile sees one of it. Where a row sees none, its partial result stays as it is, so bits do
not depend on which tiles are left out. Most splits of a small window have one tile, and are not
shared; all slots have about as many keys in a window, so none is long. A row's splits are added to
nothing, or to its head's sink: a learned score without a value.

To be read in this order:
1. query_rows.py: what a pass says of its rows and keys;
2. launch.py: the kernels of a pass, with launch_plan.py (which of them, and how the rows are cut)
   and arguments.py (what the kernels share of their arguments, and memory for partial results);
3. walk.py: the kernel of most passes, with tile_rows.py (the rows of a program), splits.py (the
   keys of a split, and adding it: the arithmetic of all kernels) and parts.py (partial results in
   memory);
4. combine.py: the kernels that add up what programs left;
5. shared_splits.py: the kernel that shares the splits of several slots, or of those with too many
   keys for one program;
6. path_tails.py: the last keys of rows with paths, which have slots of their own (in the launch of
   walk.py);
7. wide_walk.py: in place of walk.py the shared keys of many such rows, in passes that may have many
   keys, on a Hopper GPU; with wide_splits.py (which program takes which of them);
8. twin.py: the same in plain torch.
Large prompts on a Hopper GPU are those of ../prompt/, with ../warp_roles.py, which wide_walk.py is
made of, too.
"""
