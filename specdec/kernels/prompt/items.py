"""Which program of the prompt kernel takes which items: a query tile of a batch slot, a kv head.

Items of the last query tiles have most keys and come first. Programs take them in turns, back and
forth, so that all get about as many keys.
"""

from specdec.kernels import gl, gluon_jit


def count_uneven(programs: int, num_items: int, least: float) -> int:
    """Count the pairs of rounds in which programs with fewer items take the longer ones; see
    own_item.

    least: keys of the shortest item, which some programs have and others not, in steps from one
        item to the next longer one
    """
    if num_items % programs == 0:
        return 0
    # of a pair of rounds: two items, each as many steps longer as there are programs
    gain = 2 * programs
    return min(num_items // programs // 2, round(least / gain))


@gluon_jit
def num_own(place, programs, num_items):
    """Count the items of a program; place: its number."""
    rounds = num_items // programs
    return rounds + (_item_there_and_back(rounds, place, programs) < num_items)


@gluon_jit
def own_item(i, place, programs, num_items, uneven):
    """Find a program's i-th item: every other round goes back, so that programs get equal work.

    Where the last ones are long, too, programs that have an item more would have too much: those
    with fewer take the longer ones of the first `uneven` pairs of rounds.
    """
    if i < 2 * uneven:
        more = num_items % programs  # programs with an item more; they come last in `rank`
        fewer = programs - more
        is_last_back = num_items // programs % 2
        rank = is_last_back * place + (1 - is_last_back) * (programs - 1 - place)
        item = _pair(i, 0, rank, fewer)
        if rank >= fewer:
            item = _pair(i, 2 * fewer, rank - fewer, more)
        item += i // 2 * 2 * programs
    else:
        item = _item_there_and_back(i, place, programs)
    return item


@gluon_jit
def _pair(i, first, rank, programs):
    """Find the item in a pair of rounds, from item `first` on, for this many programs."""
    return first + rank + i % 2 * (2 * programs - 1 - 2 * rank)


@gluon_jit
def _item_there_and_back(i, place, programs):
    return i * programs + place + i % 2 * (programs - 1 - 2 * place)


@gluon_jit
def place_of_item(item, num_items, num_slots, G):
    """Find an item's query tile, batch slot and kv head. The tiles with most keys come first.

    From num_items on there is no item: a division of negative numbers rounds towards 0.
    """
    of_tile = num_slots * G
    return (num_items - 1 - item) // of_tile, item % of_tile // G, item % G


@gluon_jit
def item_of(i, rows, TOKENS: gl.constexpr, VARIANT: gl.constexpr):
    """Find a program's i-th item: batch slot, kv head, first row, and the end of the slot's rows.

    Items of slots that are shorter than the longest may begin at or after that end.
    """
    _idx_ptr, _positions_ptr, starts_ptr, items, num_slots, query_len = rows
    num_items, uneven = items
    item = own_item(i, gl.program_id(0), gl.num_programs(0), num_items, uneven)
    tile, b, g = place_of_item(item, num_items, num_slots, VARIANT.kv_heads)
    if VARIANT.is_uniform:
        first_row = b * query_len
        end = first_row + query_len
    else:
        first_row = gl.load(starts_ptr + b).to(gl.int32)
        end = gl.load(starts_ptr + b + 1).to(gl.int32)
    return b, g, first_row + tile * TOKENS, end


@gluon_jit
def bounds_of(rows, first_row, end, TOKENS: gl.constexpr):
    """Find the first and the last position of a query tile; each warp does so by itself."""
    EACH: gl.constexpr = gl.BlockedLayout(
        [TOKENS // 32 if TOKENS > 32 else 1], [32], [gl.num_warps()], [0]
    )
    t = first_row + gl.arange(0, TOKENS, EACH)
    position = gl.load(rows[1] + t, mask=t < end, other=-1).to(gl.int32)
    last = gl.max(position, axis=0)
    return gl.min(gl.where(t < end, position, last), axis=0), last
