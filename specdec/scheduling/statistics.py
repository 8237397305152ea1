"""What a planner has chosen and what came of it, in sums."""

from collections import Counter
from dataclasses import dataclass, field, fields

from specdec.sizes import DraftShape


@dataclass(slots=True, kw_only=True)
class PlannerStatistics:
    """Sums over the rounds observed; num_levels and num_probes over those planned.

    rounds: by the shape of the drafts that they verified; PLAIN: none
    num_rows: last sampled tokens and drafts that were verified, without padding
    num_wasted: verified drafts that did not hold
    predicted_tokens, measured_tokens: of the rounds with drafts that had a prediction
    predicted_ms, measured_ms: of steps that followed one another without a pause
    """

    rounds: Counter[DraftShape] = field(default_factory=Counter)
    num_rows: int = 0
    num_wasted: int = 0
    predicted_tokens: float = 0.0
    measured_tokens: int = 0
    num_levels: int = 0
    num_probes: int = 0
    predicted_ms: float = 0.0
    measured_ms: float = 0.0

    def since(self, earlier: "PlannerStatistics") -> "PlannerStatistics":
        names = [each.name for each in fields(self)]
        return PlannerStatistics(**{n: getattr(self, n) - getattr(earlier, n) for n in names})

    @property
    def round_tokens(self) -> dict[str, int]:
        return {"predicted": round(self.predicted_tokens), "measured": self.measured_tokens}

    @property
    def num_rounds(self) -> int:
        return self.rounds.total()

    @property
    def tree_share(self) -> float:
        num_wide = sum(count for shape, count in self.rounds.items() if shape.is_wide)
        return num_wide / self.num_rounds if self.num_rounds else 0.0

    @property
    def wasted_share(self) -> float:
        return self.num_wasted / self.num_rows if self.num_rows else 0.0
