"""Hashes of the logits from which an engine chose each token, to compare runs bit by bit."""

import itertools

import torch
from torch import Tensor

from specdec.bench import serving
from specdec.engine import Engine
from specdec.requests.request import Request
from specdec.requests.stats import SpeculationStats

Found = tuple[list, list]  # tokens and logit hashes of every prompt; no hashes with trees


class LogitHashes:
    """Listen to an engine's steps: per request, the hashes of the logits of its tokens.

    Hashed on the device after each launch; which rows count is known once the requests have ended.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._first: dict[str, Tensor] = {}
        self._rounds: dict[str, list[Tensor]] = {}
        self._run_step = engine.runner.run_step
        engine.runner.run_step = self.run_step

    def run_step(self, rows, parts, **options):
        result = self._run_step(rows, parts, **options)
        hidden_TD = self.engine.runner.buffers.hidden_states
        Q = options["shape"].rows
        R = len(rows) * Q
        if rows:
            hashes = hash_rows(self.engine, hidden_TD[:R]).view(len(rows), Q)
            for row, values in zip(rows, hashes, strict=True):
                self._rounds.setdefault(self._request_of(row), []).append(values)
        ends = itertools.accumulate((part.length for part in parts), initial=R)
        for part, end in zip(parts, list(ends)[1:], strict=True):
            if part.samples:
                [value] = hash_rows(self.engine, hidden_TD[end - 1 : end])
                self._first[self._request_of(part.state_row)] = value
        return result

    def of(self, request: Request) -> list[int]:
        """Give a hash for each token of an ended request. Rounds after its end do not count."""
        found = [self._first[request.request_id][None]]
        rounds = self._rounds.get(request.request_id, [])
        for values, record in zip(rounds, request.stats.rounds, strict=False):
            found.append(values[: record.num_accepted + 1])
        return torch.cat(found).tolist()[: len(request.token_ids)]

    def stop(self) -> None:
        del self.engine.runner.run_step  # and the class's own is there again

    def _request_of(self, row: int) -> str:
        running = self.engine.scheduler.running
        return next(request.request_id for request in running if request.state_row == row)


@torch.inference_mode()
def hash_rows(engine: Engine, hidden_TD: Tensor) -> Tensor:
    """Sum each row's logits as bits, times odd numbers by place, with wrap-around: [T] int64."""
    logits_TV = engine.runner.target.model.logits(hidden_TD)
    place_V = torch.arange(logits_TV.shape[1], device=logits_TV.device) * 2654435761 + 1
    parts = [rows.view(torch.int32).long() for rows in logits_TV.split(64)]
    return torch.cat([(bits * place_V).sum(dim=1) for bits in parts])


def run(engine: Engine, prompts: list, batch: int, length: int) -> tuple[Found, float]:
    """Generate `length` tokens from all prompts; give what was found and the acceptance length."""
    tokens, hashes, stats = [], [], []
    for start in range(0, len(prompts), batch):
        listener = LogitHashes(engine) if engine.runner.sizes.tree is None else None
        requests = serving.generate(engine, serving.greedy(prompts[start : start + batch], length))
        tokens += [request.token_ids for request in requests]
        stats += [request.stats for request in requests]
        if listener is not None:
            listener.stop()
            hashes += [listener.of(request) for request in requests]
    num_different = len({value for row in hashes for value in row})
    assert not hashes or num_different > len(tokens), "the hashes tell nothing apart"
    return (tokens, hashes), SpeculationStats.merged(stats).mean_acceptance_length or 1.0


def equals(found: Found, expected: Found) -> bool:
    """Compare as many prompts as both have, and hashes where there are some."""
    pairs = [zip(*each, strict=False) for each in zip(found, expected, strict=True)]
    return all(one == other for one, other in itertools.chain(*pairs))
