"""The order of a prefill chunk and of a round, written here and nowhere else.

Between `fill` and the end of the draft nothing reads the device from the host; whether a pass runs as a graph or op by
op is decided behind these calls.
"""

from specdec.draft import Draft
from specdec.stepping.accept_commit import accept_and_commit
from specdec.stepping.buffers import StepBuffers
from specdec.stepping.commit_chunk import commit_chunk
from specdec.stepping.results import Results
from specdec.stepping.state import RequestState
from specdec.stepping.step_sizes import Step
from specdec.target import Target


def run_chunk(
    step: Step, target: Target, draft: Draft | None, buffers: StepBuffers, state: RequestState, results: Results
) -> None:
    """Prompt rows through the target and the draft; where a prompt ends, its first token and its first drafts."""
    target.prefill(step)
    target.sample(step)
    commit_chunk(buffers, state, step.num_padded_reqs, step.num_tokens)
    results.send(step.num_reqs, target.record(step))
    if draft is not None:
        draft.prefill(step)
        if step.num_sampled > 0:
            draft.decode(step)


def run_round(
    step: Step, target: Target, draft: Draft | None, buffers: StepBuffers, state: RequestState, results: Results
) -> None:
    """Verify K drafts of every request, commit what holds, propose the next K; where nobody drafts, just one token."""
    target.verify(step)
    accept_and_commit(buffers, state, step.num_padded_reqs, step.is_decided, step.query_len)
    results.send(step.num_reqs, target.record(step))
    if draft is not None and step.has_drafts:
        draft.prefill(step)
        draft.decode(step)
