"""What torch.compile sees of the kernels: one op each, with true shapes, and nothing inside it."""

import pytest
import torch

from graphs.context import ForwardContext, set_forward_context
from specdec.config import GraphConfig
from specdec.kernels import linear
from specdec.kernels.experts import mlp, router  # noqa: F401  # makes their ops
from specdec.kernels.tile_shapes import row_class
from specdec.kernels.tiles import choose_tiles
from specdec.models.attention import AttentionMetadata
from tests.specdec.graph_walk import make_backend, tiny, tiny_runner

KERNELS = (
    "linear",
    "split_sums",
    "gate_up",
    "rms_norm",
    "add_rms_norm",
    "joint_input",
    "add",
    "store_kv",
    "room_for",
    "take_rows",
)
MOVES = {"getitem", "cat", "empty_like", "flatten", "copy_"}


@pytest.mark.parametrize("draft", ["eagle3", pytest.param("eagle1", marks=pytest.mark.slow)])
def test_a_traced_model_is_kernels_and_what_moves_tensors(draft):
    captures, device = make_backend("tape")
    config = GraphConfig(request_sizes=(2,), token_sizes=(48, 24, 16, 3, 2), compile_piecewise=True)
    runner = tiny_runner(tiny(draft, device), 2, config, captures)
    for manager, num_layers in (
        (runner.graphs.target.prefill, 2),
        (runner.graphs.draft.prefill, 1),
    ):
        pieces = manager._piecewise._runner.pieces
        assert len(pieces) == num_layers + 1, "one trace for all sizes"
        nodes = [
            node
            for piece in pieces
            for node in piece.runnable.graph.nodes
            if node.op.startswith("call_")
        ]
        names = [name_of(node.target) for node in nodes]
        assert set(names) <= MOVES | {f"specdec.{kernel}.default" for kernel in KERNELS}
        assert names.count("specdec.store_kv.default") == num_layers


def name_of(target):
    is_op = isinstance(target, str | torch._ops.OpOverload)
    return str(target) if is_op else target.__name__


@pytest.mark.parametrize("T", [1, 3, 600])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_shapes_that_the_compiler_is_told_are_the_true_ones(T, device):
    D, N = 2048, 96
    x, y = torch.rand(T, D, device=device), torch.rand(T, N, device=device)
    w, w_down, norm = (
        torch.rand(N, D, device=device),
        torch.rand(D, N, device=device),
        torch.rand(D, device=device),
    )
    parts, out = torch.rand(2, T, D, device=device), torch.empty(T, D, device=device)
    check("linear", x, w, None, torch.float32)
    check("linear", y, w_down, norm, None)
    check("joint_input", torch.zeros(T, dtype=torch.int64, device=device), w, x, norm, norm, 1e-6)
    check("split_sums", x, w, torch.float32, 0, None, None)
    check("split_sums", x, w, torch.float32, 0, N, 2 * D)
    check("split_sums", x.half(), w.half(), torch.float16, 16, 2 * N, D)
    check("gate_up", x, w, None)
    check("rms_norm", x, norm, 1e-5)
    shares = torch.rand(T, 2, device=device)
    check("add_rms_norm", parts, norm, None, 1.0, None, x, norm, 1e-5, out)
    check("add_rms_norm", parts, None, shares, 0.5, None, x, norm, 1e-5, None)
    sums = parts, None, shares, 1.0, None
    for keeps_rows in (False, True):
        check("fp8_add_rms_norm", *sums, x, norm, 1e-5, True, out, keeps_rows)
    check("add", parts, None, None, 1.0, None, x, out)
    check("router_sums", x, w)
    ids = torch.arange(T, device=device).int()[:, None] % 4
    gate_up, down = torch.rand(3, 32, D, device=device), w[:48].view(3, D, 16)
    check("expert_parts", x, ids, gate_up, None, None, down, *[None] * 6)
    biases = torch.rand(3, 32, device=device), torch.rand(3, D, device=device)
    weights = gate_up, None, biases[0], down, None, biases[1]
    check("expert_parts", x, ids, *weights, 1.5, 1.0, None, None)
    check("take_rows", x.view(T, 2, -1), y, torch.tensor([T - 1, 0], device=device))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("has_norms", [False, True])
def test_the_shape_of_the_queries_is_told_by_the_cache(device, has_norms):
    T, H, G, S, C = 3, 4, 2, 16, 32
    positions = torch.arange(T, device=device)
    metadata = AttentionMetadata(
        layer_caches=torch.zeros(1, 2, 2, G, S, C, device=device).unbind(),
        positions=positions,
        slot_mapping=positions,
        groups=(),
    )
    norms = (*torch.rand(2, C, device=device), 1e-5) if has_norms else (None, None, None)
    parts, rope = (
        torch.rand(1, T, (H + 2 * G) * C, device=device),
        torch.rand(2, 8, C // 2, device=device),
    )
    context = ForwardContext(attn_metadata=metadata, slot_mapping=positions, num_tokens=T)
    with set_forward_context(context):
        check("store_kv", parts, None, None, 1.0, None, *rope, *norms, 0, True)


def check(name, *args):
    utils = ("test_schema", "test_faketensor")
    torch.library.opcheck(getattr(torch.ops.specdec, name).default, args, test_utils=utils)


def test_the_number_of_split_sums_asks_one_thing_of_the_number_of_rows(monkeypatch):
    monkeypatch.setattr(linear, "use_triton", lambda x: True)
    counts = set()
    for N, K, whole in (
        *((96, 2048, None), (96, 512, None), (4096, 14336, None)),
        *((96, 2048, (96, 4096)), (48, 2048, (96, 2048)), (4096, 7168, (4096, 14336))),
    ):
        weight = torch.empty(N, K, device="meta")
        for T in (1, 16, 17, 64, 65, 512, 513, 5000):
            x = torch.empty(T, K, device="meta")
            tiles = choose_tiles("split", row_class(T), N, K, weight.dtype, "cpu", whole=whole)
            assert linear.num_parts(x, weight, whole) == tiles.parts
            counts.add((whole is None, T > 64, tiles.parts))
    assert {(False, False, 2), (False, True, 1), (True, True, 2)} <= counts
