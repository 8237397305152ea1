import torch
from torch.fx import symbolic_trace

from graphs.compiled import CompiledPieces, split_at
from graphs.modes import BatchDescriptor, CUDAGraphMode

PIECEWISE = CUDAGraphMode.PIECEWISE


def test_a_graph_is_split_into_a_chain_with_each_split_op_alone():
    def model(x):
        y = torch.relu(x + 1)
        z = y * 2
        return torch.relu(z) - y

    pieces = split_at(symbolic_trace(model), lambda node: node.target is torch.relu)
    ops = [
        [n.name for n in part.graph.nodes if n.op == "call_function"]
        for _, part in pieces.named_children()
    ]
    assert ops == [["add"], ["relu"], ["mul"], ["relu"], ["sub"]]
    assert torch.equal(pieces(torch.ones(2)), model(torch.ones(2)))


def test_pieces_around_the_split_op_are_captured_and_the_op_stays_live(
    backend, device, toy, in_context
):
    compiled = CompiledPieces(toy, backend.new_pool(), ["toy::scale_rows"])
    x = torch.zeros(8, 8, device=device)
    out = torch.zeros(8, 8, device=device)
    scale = torch.ones((), device=device)
    with backend.side_stream():
        for mode in (CUDAGraphMode.NONE, PIECEWISE):
            with in_context(mode, 4, scale=scale):
                compiled(x_TD=x[:4], out_TD=out[:4])
    assert compiled.num_graphs(BatchDescriptor(4)) == 4
    assert len(compiled.pieces) == 4

    x.normal_()
    expected = torch.zeros_like(x)
    with in_context(CUDAGraphMode.NONE, scale=scale * 3):
        toy(x[:4], expected[:4])
    with in_context(PIECEWISE, 4, scale=scale * 3):
        compiled(x_TD=x[:4], out_TD=out[:4])
    torch.testing.assert_close(out, expected)


def test_one_trace_serves_all_sizes_above_one(tape, cpu_toy, in_context):
    compiled = CompiledPieces(cpu_toy, tape.new_pool(), ["toy::scale_rows"])
    x = torch.zeros(8, 8)
    out = torch.zeros(8, 8)
    for n in (8, 6, 2):
        with in_context(CUDAGraphMode.NONE, n, scale=torch.ones(())):
            compiled(x_TD=x[:n], out_TD=out[:n])
    assert len(compiled.pieces) == 4


def test_as_many_rows_as_channels_are_not_tied_to_them(tape, in_context):
    compiled = CompiledPieces(lambda x_TD, out_TD: out_TD.copy_(x_TD), tape.new_pool(), [])
    x = torch.rand(8, 8)
    out = torch.zeros(8, 8)
    for n in (8, 6):
        with in_context(CUDAGraphMode.NONE, n):
            compiled(x_TD=x[:n], out_TD=out[:n])
    assert len(compiled.pieces) == 1


def test_a_number_of_the_model_is_no_input_of_the_graph(tape, in_context):
    class Shift(torch.nn.Module):
        eps = 0.5

        def forward(self, x_TD, out_TD):
            out_TD.copy_(x_TD + self.eps)

    compiled = CompiledPieces(Shift(), tape.new_pool(), [])
    x = torch.rand(8, 8)
    out = torch.zeros(8, 8)
    with in_context(PIECEWISE, 8):
        compiled(x_TD=x, out_TD=out)
        compiled(x_TD=x, out_TD=out)
    assert torch.equal(out, x + 0.5)


def test_cleared_pieces_are_captured_again(tape, cpu_toy, in_context):
    compiled = CompiledPieces(cpu_toy, tape.new_pool(), ["toy::scale_rows"])
    x = torch.zeros(8, 8)
    out = torch.zeros(8, 8)
    with in_context(PIECEWISE, 8, scale=torch.ones(())):
        compiled(x_TD=x, out_TD=out)
        assert compiled.has_captured(BatchDescriptor(8))
        compiled.clear_graphs()
        assert not compiled.has_captured(BatchDescriptor(8))
        compiled(x_TD=x, out_TD=out)
    assert compiled.num_graphs(BatchDescriptor(8)) == 4
    assert compiled.unwrap() is cpu_toy
