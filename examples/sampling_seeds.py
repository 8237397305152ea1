"""Does a seed give the same text with and without a draft? Under acceptance="exact" it does.

python examples/sampling_seeds.py
"""

from specdec import LLM, SamplingParams

PROMPT = "class Stack:\n    def __init__(self):\n"


def main() -> None:
    params = [SamplingParams(temperature=0.8, seed=seed, max_tokens=48) for seed in (1, 1, 2)]
    texts = {}
    for name, draft in {"no draft": None, "K = 3": 3, "K = 5": 5}.items():
        speculation = None if draft is None else {"model": "demo", "num_speculative_tokens": draft}
        llm = LLM("demo", speculation)
        outputs = llm.generate([PROMPT] * len(params), params, use_tqdm=False)
        texts[name] = [output.outputs[0].text for output in outputs]
        length = LLM.run_stats(outputs).mean_acceptance_length
        print(f"{name:<9} tokens per round {length:.2f}")
    first, again, other = texts["no draft"]
    print(f"the same seed twice gives the same text: {first == again}")
    print(f"another seed gives another text:         {first != other}")
    print(f"a draft changes no text:                 {len(set(map(tuple, texts.values()))) == 1}")


if __name__ == "__main__":
    main()
