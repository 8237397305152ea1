"""A step: its acts in the order in which they happen, and what each reads and writes.

The order is written here and nowhere else. A step has batch slots: first those that verify, with
the last sampled token of a request and its drafts, then parts of prompts (rounds/step_sizes.py).
One forward takes the rows of all:

    act            reads                                 writes
    fill           state.last_sampled_tokens and         input_ids, positions, slot_mapping,
                   draft_tokens; prompt tokens;          num_valid, prompt_start_loc, idx_mapping,
                   draft_probs, where rows are shared    sample_mapping, sample_states,
                   out                                   sample_starts; rows_per_slot and
                                                         verify_start_loc
    forward        the above                             hidden_states, aux_hidden_states, target KV
    choose         hidden_states, sampling state,        target_tokens, by decided row;
                   step.masks, from the host             pq_accepted, where p/q decides
    commit         target_tokens, input_ids, num_valid,  results, state rows, draft_input_ids,
                   pq_accepted                           last_token_indices, draft_positions,
                                                         proposed_tokens; where nodes have paths,
                                                         verify_start_loc, of accepted ones
    record         logits, results                       token counts; returns logprobs
    send           results, logprobs                     pinned host memory
    gather         features and rows of accepted paths   the same buffers, as rows of chains; only
                                                         where trees were verified
    prefill_draft  aux_hidden_states, draft_input_ids,   draft KV, draft_hidden, first proposals
                   last_token_indices, draft_positions
    decode_draft   draft_hidden, draft_last_tokens       draft KV, state.draft_tokens (with K = 1
                                                         prefill_draft writes them)
    send_proposals proposed_tokens, proposed_parents     pinned host memory, with guided requests

results is one tensor, and buffers.columns are its columns. The draft collects its proposals in
buffers.proposed_tokens, which commit zeroes; the next round verifies state.draft_tokens. A draft
without taps reads hidden_states, not aux_hidden_states; where nothing reads the hidden states of a
prompt's rows but the last, they stay what they were (target.py). Where rows are shared out, each
level writes its token to the state, with draft_probs; a step that proposes nothing extends the
draft's KV alone. A step verifies what the one before it has proposed; `step.next_shape` says what
it proposes.

Nothing reads the device from the host between `fill` and the end of the draft, except the masks of
guided requests, which wait for what the step before has sent. The step says how each act runs:
`step.passes` names the graphs (passes/families.py), `step.flags` what its requests ask of the
sampler.
"""

from dataclasses import dataclass

import numpy as np

from specdec.drafts.drafter import Drafter
from specdec.rounds.buffers import StepBuffers
from specdec.rounds.commit import commit_round
from specdec.rounds.fill import fill_round
from specdec.rounds.gather_paths import gather_paths
from specdec.rounds.logprobs import RecordedLogprobs
from specdec.rounds.prompts import Interval, commit_prompts, fill_prompts
from specdec.rounds.results import Results
from specdec.rounds.share import share_rows
from specdec.rounds.state import RequestState
from specdec.rounds.step_sizes import Step
from specdec.rounds.upload import upload
from specdec.sampler.sampler import Sampler
from specdec.target import Target

# the acts, by the names of the methods below: a profile divides a step into these; no request is
# guided in it
PHASES = ("fill", "forward", "choose", "commit", "record", "send", "prefill_draft", "decode_draft")


@dataclass(kw_only=True)
class Acts:
    """One engine's models, buffers and state, and what a step does with them.

    draft: None for plain decoding.
    """

    target: Target
    sampler: Sampler
    draft: Drafter | None
    buffers: StepBuffers
    state: RequestState
    results: Results
    max_model_len: int

    def run(self, step: Step) -> None:
        self.fill(step)
        self.forward(step)
        self.choose(step)
        self.commit(step)
        self.send(step, self.record(step))
        if step.shape.is_wide:
            self.gather(step)
        if step.runs_draft:
            self.prefill_draft(step.of_paths)
        if step.proposes:
            self.decode_draft(step)
            if step.flags.guided:
                self.send_proposals(step)

    def fill(self, step: Step) -> None:
        """Lay out the rows: each request's last sampled token and its drafts; prompt tokens."""
        B = step.num_padded_reqs
        T = step.num_padded_tokens
        V = step.num_verified if step.parts else B
        if V > 0:
            rows = np.full(V, -1)
            rows[: step.num_verified] = step.state_rows
            upload(self.buffers.idx_mapping, rows)
            what = V, step.shape, step.shared_rows
            if step.shared_rows:
                share_rows(self.buffers, self.state, *what)
            fill_round(self.buffers, self.state, *what, self.max_model_len)
        if step.parts:
            fill_prompts(
                self.buffers, step.parts, Interval(V, B), Interval(step.num_verify_rows, T)
            )
        else:
            self.buffers.pad_rows(step.shared_rows or V * step.shape.rows, T)

    def forward(self, step: Step) -> None:
        """Run the target over all rows."""
        self.target.forward(step)

    def choose(self, step: Step) -> None:
        """Choose the token after each row that verifies, and after each part; p/q accepts here."""
        self.sampler.choose(step)

    def commit(self, step: Step) -> None:
        """Accept drafts by equality, where p/q has not; start the prompts that end."""
        B = step.num_padded_reqs
        V = step.num_verified if step.parts else B
        if V > 0:
            what = V, step.shape, step.shared_rows
            cache = self.target.contexts.kv_cache
            commit_round(self.buffers, self.state, *what, cache, step.is_pq)
        if step.parts:
            rows = Interval(step.num_verify_rows, step.num_tokens)
            commit_prompts(self.buffers, self.state, Interval(V, B), rows)

    def record(self, step: Step) -> RecordedLogprobs:
        """Count what was generated, for penalties; logprobs where a request asks for them."""
        return self.sampler.record(step)

    def send(self, step: Step, logprobs: RecordedLogprobs) -> None:
        """Send the results to the host; nothing here waits for it."""
        self.results.send(step.num_reqs, logprobs)

    def gather(self, step: Step) -> None:
        """Cut trees down to their accepted paths: the rows of the step are then those of chains."""
        V = step.num_verified if step.parts else step.num_padded_reqs
        how = step.passes.draft_prefill
        assert how is not None, step
        num_rows = max(V * step.shape.path_len + step.num_prompt_rows, how.descriptor.num_tokens)
        gather_paths(self.buffers, V, step.shape, step.num_prompt_rows, num_rows)

    def prefill_draft(self, step: Step) -> None:
        """Extend the draft's KV by the step's rows, with the target's features; propose token 1."""
        assert self.draft is not None, step
        self.draft.extend(step)

    def decode_draft(self, step: Step) -> None:
        """Propose tokens 2..K from the draft's own hidden states."""
        assert self.draft is not None, step
        self.draft.propose(step)

    def send_proposals(self, step: Step) -> None:
        """Start the copy of the proposals to the host, which walks them by grammars."""
        self.results.send_proposals(step.num_reqs)
