"""A step: its acts in the order in which they happen, and what each reads and writes.

The order is written here and nowhere else. A step has batch slots: first those that verify, with
the last sampled token of a request and its drafts, then parts of prompts (scheduling/work.py).
Rows after which a token is chosen are decided: all that verify, and the last of each part. One
forward takes the rows of all:

    act            reads                                 writes
    fill           state rows (last_sampled_tokens,      input_ids, positions, slot_mapping,
                   num_computed_tokens, the nodes,       num_valid, prompt_start_loc, idx_mapping,
                   block_table); prompt tokens;          sample_mapping, sample_states,
                   draft_probs, where rows are shared    sample_starts; rows_per_slot and
                   out                                   verify_start_loc; paths of wide shapes
    forward        the above                             hidden_states, aux_hidden_states, target KV
    choose         hidden_states, sampling state,        logits and target_tokens, by decided row;
                   step.masks, from the host             pq_accepted, where p/q decides
    commit         target_tokens, input_ids, num_valid,  results, state rows, draft_input_ids,
                   pq_accepted                           last_token_indices, draft_positions,
                                                         proposed_tokens; of wide shapes target KV
                                                         and history, and the rows of accepted paths
    record         logits, results                       token counts; returns logprobs
    send           results, logprobs                     pinned host memory
    prefill_draft  aux_hidden_states, draft_input_ids,   draft KV, draft_hidden, the first level of
                   last_token_indices, draft_positions   nodes
    decode_draft   draft_hidden, draft_last_tokens       draft KV, the nodes of further levels; with
                                                         guided requests, pinned host memory

results is one tensor, and buffers.columns are its columns. A step verifies what the one before it
has proposed, by `step.shape`, and proposes `step.next_shape`: nodes are written to the state
(draft_tokens, draft_parents, draft_probs, num_nodes) and collected in buffers.proposed_tokens,
which commit zeroes. A step that proposes nothing (PLAIN) extends the draft's KV alone; where no
request will draft (IDLE), the draft does not even run. A draft that proposes blocks writes its KV
alone in prefill_draft, and all nodes in decode_draft, by what commit wrote to the state.

Where shapes are wider than one, the accepted path's rows are gathered before prefill_draft, and are
then those of a chain. A draft without taps reads hidden_states, not aux_hidden_states; where
nothing reads the hidden states of a prompt's rows but the last, they stay what they were
(target.py).

Nothing reads the device from the host between `fill` and the end of the draft, except the masks of
guided requests, which wait for what the step before has sent. The step says how each act runs:
`step.passes` names the graphs (passes/families.py), greedy choices after a graph's rows among them;
`step.flags` is what its requests ask of the sampler.
"""

from dataclasses import dataclass

import numpy as np

from graphs.modes import CUDAGraphMode
from specdec.drafts.drafter import Drafter
from specdec.parallel.followers import Followers
from specdec.passes.families import Captures
from specdec.rounds.buffers import StepBuffers
from specdec.rounds.commit import commit_round
from specdec.rounds.fill import fill_round
from specdec.rounds.gather_paths import gather_paths
from specdec.rounds.logprobs import RecordedLogprobs
from specdec.rounds.prompts import Interval, commit_prompts, fill_prompts
from specdec.rounds.results import Results
from specdec.rounds.share import share_rows
from specdec.rounds.short import listed_tiles, num_listed_tiles
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
    followers: other ranks, which run each step as well
    """

    target: Target
    sampler: Sampler
    draft: Drafter | None
    buffers: StepBuffers
    state: RequestState
    results: Results
    max_model_len: int
    followers: Followers | None = None

    def captures(self) -> Captures:
        """List what is captured, in order."""
        choice = self.target.graphs.choice, self.sampler.make_choice
        of_draft = () if self.draft is None else self.draft.captures()
        return [*self.target.captures(), choice, *of_draft]

    def run(self, step: Step) -> None:
        if self.followers is not None:
            step = self.followers.step(step)
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
        """Lay out the rows: each request's last sampled token and its drafts; prompt tokens."""
        V, B, T = step.num_padded_verified, step.num_padded_reqs, step.num_padded_tokens
        if V > 0:
            rows = np.full(V, -1)
            rows[: step.num_verified] = step.state_rows
            upload(self.buffers.idx_mapping, rows)
            what = V, step.shape, step.shared_rows
            if step.shared_rows:
                share_rows(self.buffers, self.state, *what)
            fill_round(self.buffers, self.state, *what, self.max_model_len)
        if step.parts:
            here = Interval(V, B), Interval(step.num_verify_rows, T)
            fill_prompts(self.buffers, step.parts, *here, self._listed_tiles(step))
        else:
            self.buffers.pad_rows(step.shared_rows or V * step.shape.rows, T)

    def _listed_tiles(self, step: Step) -> np.ndarray:
        """List the query tiles of a step with prompts, for a graph that serves it whole."""
        how = step.passes.target
        if how.mode is not CUDAGraphMode.FULL:
            return np.empty((0, 3), np.int64)
        num_tiles = num_listed_tiles(how.descriptor.num_tokens, self.buffers.sizes)
        return listed_tiles(step, num_tiles)

    def forward(self, step: Step) -> None:
        """Run the target over all rows."""
        self.target.forward(step)

    def choose(self, step: Step) -> None:
        """Choose the token after each row that verifies, and after each part; p/q accepts here."""
        self.sampler.choose(step)

    def commit(self, step: Step) -> None:
        """Accept drafts that equal the target's choices; begin to generate where a prompt ends."""
        V, B = step.num_padded_verified, step.num_padded_reqs
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

    def prefill_draft(self, step: Step) -> None:
        """Take in the step's rows, of each slot those of one path; write the first drafts."""
        assert self.draft is not None, step
        if step.shape.is_wide:
            self._gather(step)
        self.draft.extend(step.of_paths)

    def _gather(self, step: Step) -> None:
        V = step.num_padded_verified
        how = step.passes.draft_prefill
        assert how is not None, step
        num_rows = max(V * step.shape.path_len + step.num_prompt_rows, how.descriptor.num_tokens)
        gather_paths(self.buffers, V, step.shape, step.num_prompt_rows, num_rows)

    def decode_draft(self, step: Step) -> None:
        """Write the drafts of further levels; the host walks those of guided requests."""
        assert self.draft is not None, step
        self.draft.propose(step)
        if step.flags.guided:
            self.results.send_proposals(step.num_reqs)
