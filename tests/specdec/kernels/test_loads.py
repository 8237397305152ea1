"""Small kernels ask for what they load as early as they may, and for all of it at once.

And what else they load must not decide how they round.
"""

import os
import subprocess
import sys


def printed(*arguments: str) -> str:
    """As of compile_loads.py, in a process without the interpreter."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.specdec.kernels.compile_loads", *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_rotations_look_up_before_the_wait_what_the_last_product_does_not_write():
    early, late = printed("rotate").split("W")
    assert early == "LLLL"  # slot, position, cos, sin
    assert late.startswith("LLC")
    assert late.count("L") == 2


def test_partial_results_are_loaded_together():
    """Values, peak and total of each of 8; then those of rows that have more."""
    _, late = printed("combine").split("W")
    assert late.index("C") == 3 * 8


def test_the_last_keys_of_paths_are_asked_for_with_their_values_and_the_queries():
    """Each thread's 2, 16 and 16 loads, before a tile is laid out for a product."""
    _, late, *_ = printed("tails").split("W")
    assert late[: late.index("PPP")].count("L") == 2 + 16 + 16


def test_compilers_have_no_choice_which_product_of_a_rotation_is_rounded():
    fused, named = printed("rotate", "sums").splitlines()
    assert fused == named
    assert not fused.endswith(" 0")
