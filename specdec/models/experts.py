"""A mixture of experts in the place of an MLP, by the checkpoint's names.

Rows of padding choose no expert. Of several ranks each has a range of neighbouring experts: all
choose alike, each computes the slots of its own, and the reader finds every slot at its place.
Letters: T rows, D hidden, E experts, I width of each.
"""

import torch
from torch import Tensor, nn

from specdec.kernels.backend import backend
from specdec.kernels.experts.mlp import experts_mlp
from specdec.kernels.experts.mxfp4 import CODES, ROWS, SCALES
from specdec.kernels.experts.route import route
from specdec.kernels.experts.router import router_logits
from specdec.kernels.experts.weight import Weight
from specdec.kernels.fp8.weight import E4M3, num_groups
from specdec.kernels.linear import Sums
from specdec.kernels.opaque import opaque
from specdec.models.attention import cache_slots
from specdec.models.layers import Linear, Quantised, parameter
from weights.config import ExpertsConfig
from weights.shard import WHOLE

HITTING_ALL = 4  # times E / k rows that choose at random hit 98 % of E experts


def rows_adding_experts(experts: ExpertsConfig | None) -> int:
    """Bound the rows that hit ever more experts; more rows hit nearly all. None: 0."""
    return 0 if experts is None else HITTING_ALL * experts.num // experts.per_token


class Experts(nn.Module):
    """A router, and the MLPs among which it chooses for each row."""

    def __init__(self, hidden_size: int, config: ExpertsConfig) -> None:
        super().__init__()
        self.config = config
        self.gate = Linear(hidden_size, config.num, config.has_biases)
        self.experts = ExpertWeights(hidden_size, config)

    def forward(self, x: Tensor | Quantised, rows_T: Tensor | None = None) -> Sums:
        """x: with its plain rows. rows: which rows of the pass these are; None: all, in order."""
        config = self.config
        x_TD, codes = (x, None) if isinstance(x, Tensor) else (x.plain_TD, x.rows)
        assert x_TD is not None, "a router reads plain rows"
        logits = router_logits(x_TD, self.gate.weight, self.gate.bias)
        weights = self.experts.weights
        choice = logits, config.per_token, config.renormalise, rows_T
        if config.shard != WHOLE:
            held = config.held
            ids, shares, places = choose_of_held(*choice, held.start, len(held))
            sums = experts_mlp(x_TD, ids, shares, *weights, config.clamp, codes)
            return sums._replace(places_TS=places)
        chosen = choose_experts(*choice)
        other = None if torch.compiler.is_compiling() else backend.get().experts
        if other is not None:
            return Sums(other(x_TD, *chosen, *self.experts.plain_weights)[None], None)
        return experts_mlp(x_TD, *chosen, *weights, config.clamp, codes)


class ExpertWeights(nn.Module):
    """The weights of the experts of a layer that are held; gate rows before up rows.

    They have the names that weights/arrange.py gives, whatever the form.
    """

    def __init__(self, hidden_size: int, config: ExpertsConfig) -> None:
        super().__init__()
        self._config = config
        gate_up = _weight(config.width, 2, hidden_size, config)
        down = _weight(hidden_size, 1, config.width, config)
        self.gate_up_proj, self.gate_up_proj_scales, self.gate_up_proj_bias = gate_up
        self.down_proj, self.down_proj_scales, self.down_proj_bias = down

    @property
    def weights(self) -> tuple[Weight, Weight]:
        """Give both products' weights: gate_up and down."""
        gate_up = Weight(self.gate_up_proj, self.gate_up_proj_scales, self.gate_up_proj_bias)
        return gate_up, Weight(self.down_proj, self.down_proj_scales, self.down_proj_bias)

    @property
    def plain_weights(self) -> tuple[Tensor, Tensor]:
        """Give them as they are to other kernels, which know neither biases nor other forms."""
        config = self._config
        if config.form != "plain" or config.has_biases or config.clamp is not None:
            line = "packed experts, biases or a clamped SwiGLU: only specdec's kernels know them"
            raise RuntimeError(line)
        return self.gate_up_proj, self.down_proj


def _weight(
    num_rows: int, parts: int, K: int, config: ExpertsConfig
) -> tuple[nn.Parameter, nn.Parameter | None, nn.Parameter | None]:
    """Make room for a product of all held experts, with K columns: the fields of `Weight`.

    num_rows: of each part
    """
    E, N = len(config.held), parts * num_rows
    bias = parameter(E, N) if config.has_biases else None
    if config.form == "plain":
        return parameter(E, N, K), None, bias
    if config.form != "mxfp4":
        scales = (E, num_groups(K), N) if config.form == "fp8 block" else (E, N)
        return parameter(E, N, K, dtype=E4M3), parameter(*scales, dtype=torch.float32), bias
    blocks = -(-K // CODES), parts * -(-num_rows // ROWS)
    words = parameter(E, *blocks, 128, 4, dtype=torch.int32)
    return words, parameter(E, -(-K // (32 * SCALES)), N, dtype=torch.int32), bias


def _empty_choice(
    logits: Sums, num_chosen: int, is_renormalized: bool, rows_T: Tensor | None
) -> tuple[Tensor, Tensor]:
    T = logits.parts_STN.shape[1]
    ids_TS = logits.parts_STN.new_empty(T, num_chosen, dtype=torch.int32)
    return ids_TS, logits.parts_STN.new_empty(T, num_chosen)


@opaque(_empty_choice)
def choose_experts(
    logits: Sums, num_chosen: int, is_renormalized: bool, rows_T: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return ids and weights of each row's experts [T, k]; see route.py."""
    found = route(logits, num_chosen, is_renormalized, cache_slots(), rows_T)
    return found.ids_TS, found.weights_TS


def _empty_places(
    logits: Sums, num_chosen: int, is_renormalized: bool, rows_T: Tensor | None, *held: int
) -> tuple[Tensor, Tensor, Tensor]:
    ids_TS, weights_TS = _empty_choice(logits, num_chosen, is_renormalized, rows_T)
    return ids_TS, weights_TS, torch.empty_like(ids_TS)


@opaque(_empty_places)
def choose_of_held(
    logits: Sums,
    num_chosen: int,
    is_renormalized: bool,
    rows_T: Tensor | None,
    first: int,
    num_held: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids among this rank's experts, and weights and places of all [T, k]; see route.py."""
    held = range(first, first + num_held)
    found = route(logits, num_chosen, is_renormalized, cache_slots(), rows_T, held)
    assert found.places_TS is not None
    return found.ids_TS, found.weights_TS, found.places_TS
