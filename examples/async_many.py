"""Many requests from one event loop: each prints when it ends, one is aborted on the way.

python examples/async_many.py
"""

import asyncio

from specdec import AsyncLLM, SamplingParams

PROMPTS = {
    "short": ("def add(a, b):\n", 16),
    "long": ("class Matrix:\n    def __init__(self, rows):\n", 64),
    "aborted": ("import os\n", 400),
}


async def run(llm: AsyncLLM, name: str) -> None:
    prompt, max_tokens = PROMPTS[name]
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    async for output in llm.generate(prompt, params, request_id=name):
        written = output.outputs[0]
        if name == "aborted" and len(written.token_ids) >= 8 and not output.finished:
            await llm.abort(name)
    print(f"{name}: {len(written.token_ids)} tokens, ended by {written.finish_reason}")


async def main() -> None:
    async with AsyncLLM("demo", {"model": "demo", "num_speculative_tokens": 3}) as llm:
        await asyncio.gather(*(run(llm, name) for name in PROMPTS))


if __name__ == "__main__":
    asyncio.run(main())
