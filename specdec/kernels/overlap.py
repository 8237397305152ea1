"""Programmatic dependent launch: a kernel starts while the one before it still runs.

Every kernel calls `wait_for_inputs` before it reads what may be new, or writes: it waits there for
the end of the kernel before it, so only its start runs ahead. Small kernels let the next one start
at once (`begin`, or before they look up what they may); products do so after their loop, since
programs that wait would take the places of those that read; few_rows.py does when its last tiles
are on their way, and persistent/ at its start, since its programs all have their places. Both ask
for weights before they wait, as norms.py does.
PDL comes from `launch_options`: a Hopper GPU or later.

Products wait before they let the next kernel start. So what was written before the last product is
finished when any kernel after it starts, and attention looks up before its wait where its rows are
and which positions, blocks, state rows and paths these have; rotate_and_store.py reads positions,
slots, cos and sin there, norms.py the stream that it adds to, and so do the kernels that
commit a round and write levels; the second product of experts finds its rows there. They read what
changes past the L1 cache, which may be older.
`loaded_with` and `wait_for_inputs_knowing` keep such work where it is written.

The attention of a pass may be several launches for different rows, which need not wait for each
other. The kernel that walks keys lets the next one start only once it has waited itself
(`begin_beside`). So when the next one starts, all that came before the attention has ended, and it
may read queries and keys at once, too. It waits before it ends instead (`end_beside`), so waiting
for the last launch waits for all of them. Programs that share splits and have none end without
waiting: the first of each query tile, or of the launch, waits for all of them. So do programs for
the last keys of paths that have no part of them. Beside the walk of many nodes
(wide_walk.py), whose programs all wait before they let the next start, all but the first end as
soon as they have left their results, and others take their places. That walk has its keys loaded
without a wait, as they were there before the last product; one warp waits for the queries.

A kernel of push.py waits for other GPUs before it ends. All of its programs have their places when
the next kernel starts, so that one cannot keep them from sending.

Tried and dropped: prefetching weights into the L2 cache before the wait costs 1 to 3 % of a decode
pass, where copies to shared memory (few_rows.py) gain; prefetching the next product's from programs
beside the small kernels brings 0 to 2 %; prefetching a program's first four tiles of keys and
values is 3 to 5 % faster for one request after up to 2,048 tokens, and slower with more of either.
"""

from specdec.kernels import jit, tl


@jit
def begin(PDL: tl.constexpr):
    let_the_next_start(PDL)
    wait_for_inputs(PDL)


@jit
def wait_for_inputs(PDL: tl.constexpr):
    """Wait until all kernels before this one have ended and their writes are visible."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@jit
def wait_for_inputs_knowing(a, b, PDL: tl.constexpr):
    """Wait for inputs once two 32-bit numbers are known, of which none is negative.

    Otherwise compilers put off until after the wait what is needed only there.
    """
    if PDL:
        tl.inline_asm_elementwise(
            """{
                .reg .pred p;
                .reg .b32 both;
                or.b32 both, $1, $2;
                setp.ne.s32 p, both, 0x80000000;
                @p griddepcontrol.wait;
                mov.u32 $0, 0;
            }""",
            "=r,r,r,~{memory}",
            [a, b],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@jit
def loaded_with(x, other):
    """Return x once `other` is known too, so that both lookups are under way at once.

    Compilers move a lookup to where its result is first used: after a branch, so after the lookup
    that the branch needs. other: never -2**31
    """
    return tl.where(other == -(2**31), 0, x)


@jit
def loaded_before(x, PDL: tl.constexpr):
    """Keep a float32 load before the wait: weights, or what the last product began after.

    Otherwise compilers move the load after the wait, where it queues up with weights that the
    product after this kernel has asked for meanwhile.
    """
    x = x.to(tl.float32)
    if PDL:
        x = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=False, pack=1
        )
    return x


@jit
def asked_for(x, PDL: tl.constexpr):
    """Ask for a loaded tile of numbers of 16 or 32 bits before any such tile is waited for.

    Otherwise compilers lay out one tile for a product before they ask for the next one.
    """
    if PDL:
        PACK: tl.constexpr = 32 // x.dtype.primitive_bitwidth
        bits = x if PACK == 2 else x.to(tl.int32, bitcast=True)
        bits = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [bits], dtype=bits.dtype, is_pure=False, pack=PACK
        )
        x = bits if PACK == 2 else bits.to(x.dtype, bitcast=True)
    return x


@jit
def loads_come_first(PDL: tl.constexpr):
    """Return true, unknown to compilers: loads before a branch on it are asked for first.

    Otherwise they compute with some of them before they ask for the others, to use fewer registers.
    """
    one = tl.full((), 1, tl.int32)
    if PDL:  # a launch's programs along the last axis: compilers do not know it is positive
        one = tl.inline_asm_elementwise(
            "mov.u32 $0, %nctaid.z;", "=r,r", [one], dtype=tl.int32, is_pure=False, pack=1
        )
    return one > 0


@jit
def let_the_next_start(PDL: tl.constexpr):
    """Let the next kernel take free places, once every program has called this."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@jit
def begin_beside(is_beside, PDL: tl.constexpr):
    """Start a kernel of attention. is_beside: 0: it follows another kind of kernel."""
    if is_beside == 0:
        wait_for_inputs(PDL)
    let_the_next_start(PDL)


@jit
def end_beside(PDL: tl.constexpr):
    """End a kernel of attention, on every way out."""
    wait_for_inputs(PDL)
