"""A step: its acts in the order in which they happen, and what each reads and writes.

The order is written here and nowhere else. A step is a chunk of prompts, or a round that verifies
the drafts of everything that runs (stepping/step_sizes.py). Both run the same acts:

    act            reads                                 writes
    fill           state.last_sampled_tokens and         input_ids, positions, slot_mapping,
                   draft_tokens; prompt tokens           num_valid, query_start_loc, sample_mapping,
                                                         sample_states, sample_starts
    forward        the above                             hidden_states, aux_hidden_states, target KV
    choose         hidden_states, sampling state         target_tokens (a chunk: sampled_tokens);
                                                         pq_accepted, where p/q decides
    commit         target_tokens, input_ids, num_valid,  results, state rows, draft_input_ids,
                   pq_accepted                           last_token_indices, buffers.draft_tokens
    record         logits, results                       token counts; returns logprobs
    send           results, logprobs                     pinned host memory
    prefill_draft  aux_hidden_states, draft_input_ids,   draft KV, draft_hidden, first proposals
                   last_token_indices
    decode_draft   draft_hidden, draft_last_tokens       draft KV, state.draft_tokens (with K = 1
                                                         prefill_draft writes them)

results is one tensor; sampled_tokens, num_accepted and verified_tokens are columns of it. The draft
collects its proposals in buffers.draft_tokens, which commit zeroes; state.draft_tokens are those
that the next round verifies. A draft without taps reads hidden_states, not aux_hidden_states.

Nothing reads the device from the host between `fill` and the end of the draft. The step says how
each act runs: `step.passes` names the graphs (passes/families.py), `step.flags` what its requests
ask of the sampler.
"""

from dataclasses import dataclass

import numpy as np

from specdec.draft import Draft
from specdec.sampler.sampler import Sampler
from specdec.stepping.buffers import StepBuffers
from specdec.stepping.commit import accept_and_commit, commit_chunk
from specdec.stepping.fill import fill_chunk, fill_round
from specdec.stepping.logprobs import RecordedLogprobs
from specdec.stepping.results import Results
from specdec.stepping.state import RequestState
from specdec.stepping.step_sizes import Step
from specdec.stepping.upload import upload
from specdec.target import Target

# the acts, by the names of the methods below: what a profile divides a step into
PHASES = ("fill", "forward", "choose", "commit", "record", "send", "prefill_draft", "decode_draft")


@dataclass(kw_only=True)
class Acts:
    """One engine's models, buffers and state, and what a step does with them.

    draft: None for plain decoding.
    """

    target: Target
    sampler: Sampler
    draft: Draft | None
    buffers: StepBuffers
    state: RequestState
    results: Results
    max_model_len: int

    def run(self, step: Step) -> None:
        """The step."""
        self.fill(step)
        self.forward(step)
        self.choose(step)
        self.commit(step)
        self.send(step, self.record(step))
        if step.runs_draft:
            self.prefill_draft(step)
        if step.proposes:
            self.decode_draft(step)

    def fill(self, step: Step) -> None:
        """Lay out the rows: prompt tokens, or each request's last sampled token and its drafts."""
        buffers = self.buffers
        B = step.num_padded_reqs
        T = step.num_padded_tokens
        if step.query_len is None:  # a chunk
            fill_chunk(buffers, step.parts, B, T)
            return
        rows = np.full(B, -1)
        rows[: step.num_reqs] = step.state_rows
        upload(buffers.idx_mapping, rows)
        fill_round(buffers, self.state, B, self.max_model_len, step.query_len)
        buffers.pad_rows(B * step.query_len, T)

    def forward(self, step: Step) -> None:
        """The target over all rows."""
        self.target.forward(step)

    def choose(self, step: Step) -> None:
        """The token after each row of a round, or after each part of a chunk; p/q accepts here."""
        self.sampler.choose(step)

    def commit(self, step: Step) -> None:
        """Accept drafts by equality, where p/q has not, and advance the state rows."""
        if step.query_len is None:  # a chunk
            commit_chunk(self.buffers, self.state, step.num_padded_reqs, step.num_tokens)
        else:
            accept_and_commit(
                self.buffers, self.state, step.num_padded_reqs, step.is_pq, step.query_len
            )

    def record(self, step: Step) -> RecordedLogprobs:
        """Count what was generated, for penalties; logprobs where a request asks for them."""
        return self.sampler.record(step)

    def send(self, step: Step, logprobs: RecordedLogprobs) -> None:
        """Start the copy of the results to the host; nothing here waits for it."""
        self.results.send(step.num_reqs, logprobs)

    def prefill_draft(self, step: Step) -> None:
        """Extend the draft's KV by the step's rows, with the target's features; propose token 1."""
        assert self.draft is not None, step
        self.draft.prefill(step)

    def decode_draft(self, step: Step) -> None:
        """Propose tokens 2..K from the draft's own hidden states."""
        assert self.draft is not None, step
        self.draft.decode(step)
