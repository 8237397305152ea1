"""The openai package against `specdec serve`: whole, as a stream, and how much drafts brought.

specdec serve demo --draft demo            # in another terminal
python examples/openai_client.py
python examples/openai_client.py --url http://127.0.0.1:8000/v1 --model demo
"""

import argparse
import os

from openai import OpenAI

MESSAGES = [{"role": "user", "content": "class Queue(object):\n    def __init__(self):"}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", help="default: the first one that the server has")
    args = parser.parse_args()
    client = OpenAI(base_url=args.url, api_key=os.environ.get("SPECDEC_API_KEY", "none"))
    model = args.model or client.models.list().data[0].id
    ask = {"model": model, "messages": MESSAGES, "max_tokens": 48, "temperature": 0.8, "seed": 3}

    answer = client.chat.completions.create(**ask)
    print(answer.choices[0].message.content)
    details = answer.usage.completion_tokens_details
    accepted, rejected = details.accepted_prediction_tokens, details.rejected_prediction_tokens
    print(f"\ndrafts accepted: {accepted} of {accepted + rejected}")

    pieces = []
    for chunk in client.chat.completions.create(**ask, stream=True):
        pieces.append(chunk.choices[0].delta.content or "")
    print(f"pieces of the stream: {len(pieces)}")
    print(f"the same seed, the same text: {''.join(pieces) == answer.choices[0].message.content}")


if __name__ == "__main__":
    main()
