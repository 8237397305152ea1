"""A relay: unfinished sums are left in memory for the next program; each group has a place there.

The flag of a place is 1 from when sums are written there until they are taken over.
"""

from specdec.kernels import barrier, gl, gluon_jit


@gluon_jit
def leave(results, sums, FORM: gl.constexpr, GROUP: gl.constexpr):
    """Unfinished sums, for the same warps of the same program of the next group."""
    place = gl.program_id(0) * 2 + GROUP
    for i in gl.static_range(len(sums)):
        gl.store(_left(results.room_ptr + place * FORM.num_left, sums, i), sums[i])
    barrier()
    _write_flag(results.flags_ptr + place, 1)


@gluon_jit
def take_over(results, sums, m_tiles, FORM: gl.constexpr, GROUP: gl.constexpr):
    """What the same warps have left in the group before. sums: tiles like them."""
    COUNT: gl.constexpr = len(sums)
    place = (gl.program_id(0) - m_tiles) * 2 + GROUP
    room_ptr = results.room_ptr + place * FORM.num_left
    _await_flag(results.flags_ptr + place)
    barrier()
    _write_flag(results.flags_ptr + place, 0)
    if COUNT == 1:
        return (gl.load(_left(room_ptr, sums, 0)),)
    elif COUNT == 2:
        return gl.load(_left(room_ptr, sums, 0)), gl.load(_left(room_ptr, sums, 1))
    else:
        return (
            gl.load(_left(room_ptr, sums, 0)),
            gl.load(_left(room_ptr, sums, 1)),
            gl.load(_left(room_ptr, sums, 2)),
            gl.load(_left(room_ptr, sums, 3)),
        )


@gluon_jit
def _left(room_ptr, sums, i: gl.constexpr):
    """Where tile i of a group's sums is left."""
    LAYOUT: gl.constexpr = sums[i].type.layout
    HALF: gl.constexpr = sums[i].shape[0]
    ROWS: gl.constexpr = sums[i].shape[1]
    n = gl.arange(0, HALF, layout=gl.SliceLayout(1, LAYOUT))
    m = gl.arange(0, ROWS, layout=gl.SliceLayout(0, LAYOUT))
    return room_ptr + i * HALF * sums[0].shape[1] + n[:, None] * ROWS + m[None, :]


@gluon_jit
def _write_flag(flag_ptr, value):
    """By one thread of the four warps, after what all of them wrote."""
    EACH: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    gl.inline_asm_elementwise(
        """{
            .reg .pred first;
            .reg .u32 thread;
            mov.u32 thread, %tid.x;
            and.b32 thread, thread, 127;
            setp.eq.u32 first, thread, 0;
            @first st.release.gpu.global.s32 [$1], $2;
            mov.u32 $0, 0;
        }""",
        "=r,l,r",
        [
            flag_ptr + gl.zeros([128], gl.int32, EACH),
            value + gl.zeros([128], gl.int32, EACH),
        ],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon_jit
def _await_flag(flag_ptr):
    """Until it is 1; each thread sees what was written before."""
    EACH: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    gl.inline_asm_elementwise(
        """{
            .reg .pred is_unset;
        again:
            ld.acquire.gpu.global.s32 $0, [$1];
            setp.eq.s32 is_unset, $0, 0;
            @is_unset bra again;
        }""",
        "=r,l",
        [flag_ptr + gl.zeros([128], gl.int32, EACH)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
