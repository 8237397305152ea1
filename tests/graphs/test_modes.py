import pytest

from graphs.modes import BatchDescriptor, CUDAGraphMode


@pytest.mark.parametrize(
    "mode, decode, mixed, is_separate, has_pieces",
    [
        ("NONE", "NONE", "NONE", False, False),
        ("PIECEWISE", "PIECEWISE", "PIECEWISE", False, True),
        ("FULL", "FULL", "FULL", False, False),
        ("FULL_DECODE_ONLY", "FULL", "NONE", True, False),
        ("FULL_AND_PIECEWISE", "FULL", "PIECEWISE", True, True),
    ],
)
def test_a_compound_mode_names_one_mode_for_decode_and_one_for_the_rest(
    mode, decode, mixed, is_separate, has_pieces
):
    mode = CUDAGraphMode[mode]
    assert mode.decode_mode() is CUDAGraphMode[decode]
    assert mode.mixed_mode() is CUDAGraphMode[mixed]
    assert mode.separate_routine() is is_separate
    assert mode.has_piecewise_cudagraphs() is has_pieces


def test_descriptors_with_equal_fields_are_one_key():
    assert {BatchDescriptor(8, 2, 4): 1}[BatchDescriptor(8, 2, 4)] == 1
    assert BatchDescriptor(8) != BatchDescriptor(8, 2, 4)
    assert BatchDescriptor(8) != BatchDescriptor(8, has_lora=True)
