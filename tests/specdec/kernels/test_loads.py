"""Small kernels ask for all that they load before they compute with some of it.

And what else they load must not decide how they round.
"""

import os
import subprocess
import sys

import pytest


def printed(*arguments: str) -> str:
    """As of compile_loads.py, in a process without the interpreter."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.specdec.kernels.compile_loads", *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("kernel, num_early, num_late", [("norm", 4, 8), ("rotate", 4, 2)])
def test_what_the_last_product_left_is_loaded_at_once(kernel, num_early, num_late):
    early, late = printed(kernel).split("W")
    assert early == "L" * num_early
    assert late.count("L") == num_late
    assert late.startswith("L" * num_late + "C")


def test_partial_results_are_loaded_together():
    """Values, peak and total of each of 8; then those of rows that have more."""
    _, late = printed("combine").split("W")
    assert late.index("C") == 3 * 8


def test_compilers_have_no_choice_which_product_of_a_rotation_is_rounded():
    fused, named = printed("rotate", "sums").splitlines()
    assert fused == named
    assert not fused.endswith(" 0")
