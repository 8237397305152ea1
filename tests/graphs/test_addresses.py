from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from graphs.addresses import addresses, check_addresses, debug_enabled
from graphs.context import ForwardContext
from graphs.protocol import CaptureError


@dataclass(slots=True)
class Inner:
    lengths: torch.Tensor


def test_every_tensor_that_a_call_reads_has_a_name():
    t = torch.zeros(3)
    metadata = SimpleNamespace(inner=[Inner(t)], table={"rows": t}, count=3)
    context = ForwardContext(attn_metadata=metadata, slot_mapping=t, num_tokens=3)
    named = addresses((t, 3), {"bias": (t, None)}, context)
    assert set(named) == {
        "args[0]",
        "bias[0]",
        "slot_mapping",
        "attn_metadata.inner[0].lengths",
        "attn_metadata.table['rows']",
    }
    assert set(named.values()) == {t.data_ptr()}


def test_changed_new_and_lost_addresses_are_all_named():
    check_addresses({"a": 1}, {"a": 1})
    with pytest.raises(
        CaptureError,
        match="a: 0x1 at capture, 0x2 now; b: 0x3 at capture, no tensor now; c: no tensor",
    ):
        check_addresses({"a": 1, "b": 3}, {"a": 2, "c": 4})


@pytest.mark.parametrize("value, expected", [("1", True), ("0", False), (None, False)])
def test_debugging_is_on_when_the_variable_says_so(monkeypatch, value, expected):
    monkeypatch.delenv("SPECDEC_DEBUG", raising=False)
    if value is not None:
        monkeypatch.setenv("SPECDEC_DEBUG", value)
    assert debug_enabled() is expected
