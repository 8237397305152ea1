"""What a user chooses of a draft, checked once. "auto" is resolved in start/speculation.py."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from specdec.arguments import (
    check_choice,
    check_int,
    check_name,
    from_mapping,
    is_integer,
    is_list,
    refusing_unknown,
)
from specdec.described import DRAFTING, ENGINES, about, check_described, option
from specdec.from_vllm import SPECULATION

AUTO = "auto"
ACCEPTANCE_RULES = ("exact", "rejection", "block")
METHODS = ("auto", "eagle", "eagle3", "peagle", "mtp", "dflash", "dspark", "dflash2")
OTHER_METHODS = (  # of vLLM
    *("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator", "draft_model"),
    *("deepseek_mtp", "mimo_mtp", "ernie_mtp", "qwen3_next_mtp", "longcat_flash_mtp", "custom"),
)
MOST_DRAFTS = 32
MOST_NODES = 63  # of a tree, which with its root fill a tile of rows
MOST_CHILDREN = 16
MOST_RANKS = 256


@refusing_unknown(SPECULATION)
@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """Names a draft and says how many tokens it proposes per round.

    Tokens depend on none of these options but `acceptance`.
    """

    COMMANDS = DRAFTING

    model: str | Path = field(
        metadata=about(
            'draft: directory, hub id, "demo" or "demo-dspark"', flag="--draft", unset="no draft"
        )
    )
    num_speculative_tokens: int | str = option(
        AUTO,
        f"most drafts per round, at most {MOST_DRAFTS}; auto: 8 if the number adapts, else 3; of "
        "P-EAGLE, DFlash, DSpark and DFlash2 as many as they are trained for, at most 8",
        short="-k",
        metavar="INTEGER|auto",
    )
    method: str = option(
        "auto",
        "auto reads it from the checkpoint; the others require that kind",
        commands=ENGINES,
    )
    acceptance: str = option(
        "exact",
        "exact, rejection or block: how sampled drafts are accepted",
        text="exact: the output is that of plain decoding, sampled or greedy; rejection and block "
        "keep the distribution of sampled tokens but not the tokens, and accept more drafts "
        "(greedy output stays exact)",
        choices=ACCEPTANCE_RULES,
    )
    aux_layers: Sequence[int] | None = option(
        None,
        "target boundaries that the draft reads, as in 2,4,5 (b: the stream entering layer b)",
        unset="those that the draft's checkpoint names",
        commands=ENGINES,
    )
    revision: str | None = option(
        None,
        "branch, tag or commit of the draft's hub id",
        flag="--draft-revision",
        commands=ENGINES,
    )
    draft_tensor_parallel_size: int | None = option(
        None,
        "1: the draft is whole on each of several GPUs, not cut as the target is",
        unset="tensor_parallel_size",
        bounds=(1, MOST_RANKS),
        commands=ENGINES,
    )
    adaptive: bool | None = option(
        None,
        "that many drafts in every round, not as many as pay",
        text="draft as many tokens as pay, and verify the most probable drafts of all requests; "
        "False: num_speculative_tokens for each. Adapting needs graphs on a GPU and acceptance "
        "exact; elsewhere the number is fixed, and the log says why",
        unset="True, but for a tree",
        flag="--fixed-drafts",
        gives=False,
    )
    top_k: int | None = option(
        None,
        "1: chains; above 1: a tree of -k levels, in which as many nodes get as many children",
        text="1: chains; above 1: a tree in every round, of num_speculative_tokens levels, in "
        "which the top_k best nodes of a level get top_k children each, and the num_draft_tokens "
        "most probable nodes of all levels are verified. Such trees need acceptance exact, a fixed "
        "number of levels and a max_num_seqs of at most 32, which is then its default. None: "
        "chains, but where auto adapts, up to 8 requests at a time get trees of top_k 4 in the "
        "rounds in which these pay more: 15 nodes in 8 levels for one request, fewer for more",
        unset="with -k auto as it pays, else 1",
        bounds=(1, MOST_CHILDREN),
        flag="--draft-top-k",
    )
    num_draft_tokens: int | None = option(
        None,
        "nodes of a tree to verify in a round; of a chain always -k",
        unset="-k",
        bounds=(0, MOST_NODES),
    )
    draft_confidence_threshold: float | None = option(
        None,
        "draft on only while the best paths are on average at least this probable; 0: always",
        text="from 0 to below 1: draft another level only while the best paths of the last one "
        "have at least this probability by the draft, on average over the requests. 0: draft all "
        "levels. Needs acceptance exact",
        unset="as it pays, or 0",
        metavar="PROBABILITY",
    )

    def __post_init__(self) -> None:
        _refuse_other_drafts(self.method)
        check_described(self)
        if not isinstance(self.model, str | Path) or not str(self.model):
            wanted = "give a directory, a hub id owner/name, demo, demo-dspark or demo-experts"
            raise ValueError(f"model={self.model!r}: {wanted}")
        levels = self.num_speculative_tokens
        if not isinstance(levels, str):
            check_int("num_speculative_tokens", levels, 0, MOST_DRAFTS)
        elif levels != AUTO:
            allowed = f"give {AUTO!r}, or an integer from 0 to {MOST_DRAFTS}"
            raise ValueError(f"num_speculative_tokens={levels!r}: {allowed}")
        if self.acceptance != "exact" and levels == 0:
            given = f"acceptance={self.acceptance!r} with num_speculative_tokens=0"
            raise ValueError(f"{given}: there are no drafts to accept: leave one of them out")
        layers = self.aux_layers
        if layers is not None and not (is_list(layers) and layers and all(map(is_integer, layers))):
            wanted = "give a list of the target's boundaries, or None"
            raise ValueError(f"aux_layers={layers!r}: {wanted}")
        check_name("revision", self.revision)
        self._check_threshold()
        count = self.num_draft_tokens
        if self.has_fixed_tree:
            self._check_tree()
        elif count is not None and count != levels:
            given = f"num_draft_tokens={count} without a top_k above 1"
            why = f"a chain has num_speculative_tokens={levels} drafts"
            raise ValueError(f"{given}: {why}: leave it out, or raise top_k")

    @property
    def has_fixed_tree(self) -> bool:
        """Say whether a tree is drafted in every round."""
        return self.top_k is not None and self.top_k > 1

    def _check_threshold(self) -> None:
        threshold = self.draft_confidence_threshold
        if threshold is None:
            return
        given = f"draft_confidence_threshold={threshold!r}"
        is_number = isinstance(threshold, int | float) and not isinstance(threshold, bool)
        if not is_number or not 0 <= threshold < 1:
            raise ValueError(f"{given}: give a probability from 0 to below 1, or None")
        if threshold > 0 and self.acceptance != "exact":
            rule = f"acceptance={self.acceptance!r}"
            raise ValueError(f"{given} with {rule}: drafts stop with 'exact' only: leave one out")
        levels = self.num_speculative_tokens
        if threshold > 0 and isinstance(levels, int) and levels < 2:
            why = "a first draft is always made: give 2 or more, or leave it out"
            raise ValueError(f"{given} with num_speculative_tokens={levels}: {why}")

    def _check_tree(self) -> None:
        k, levels = self.top_k or 1, self.num_speculative_tokens
        if self.acceptance != "exact":
            given = f"top_k={k} with acceptance={self.acceptance!r}"
            raise ValueError(f"{given}: trees are verified by 'exact' only: leave one of them out")
        if self.adaptive:
            given = f"top_k={k} with adaptive=True"
            raise ValueError(f"{given}: the levels of a tree are fixed: give adaptive=False")
        if not isinstance(levels, int) or levels == 0:
            given = f"num_speculative_tokens={levels!r} with top_k={k}"
            raise ValueError(f"{given}: a tree has fixed levels: give 1 to {MOST_DRAFTS} of them")
        most = min(k + k * k * (levels - 1), MOST_NODES)
        count = levels if self.num_draft_tokens is None else self.num_draft_tokens
        if not 1 <= count <= most:
            tree = f"of a tree of num_speculative_tokens={levels} levels with top_k={k}"
            raise ValueError(f"num_draft_tokens={count}: {tree} 1 to {most} nodes can be verified")

    @staticmethod
    def of(value: "SpeculativeConfig | Mapping[str, object] | None") -> "SpeculativeConfig | None":
        """Accept the class, a dict of its fields, or None."""
        if value is None or isinstance(value, SpeculativeConfig):
            return value
        if not isinstance(value, Mapping):
            raise ValueError(
                f"speculative_config={value!r}: give a SpeculativeConfig or a dict of its fields"
            )
        if not value.keys() & SPECULATION.keys():  # before a model is missed
            _refuse_other_drafts(value.get("method", AUTO))
        return from_mapping(SpeculativeConfig, value, SPECULATION)


def _refuse_other_drafts(method: object) -> None:
    if isinstance(method, str) and method in OTHER_METHODS:
        kinds = "EAGLE, P-EAGLE, DFlash and DSpark heads"
        advice = f"drafts come from {kinds}: give one as model=, no method"
        raise ValueError(f"method={method!r}: {advice}")
    check_choice("method", method, METHODS)
