"""JSON that follows a schema from `specdec serve`, read into a dataclass.

specdec serve demo --draft demo            # in another terminal
python examples/structured.py
python examples/structured.py --url http://127.0.0.1:8000/v1 --prompt "A small shirt as JSON: "
"""

import argparse
import json
import os
from dataclasses import dataclass

from openai import OpenAI


@dataclass
class Shirt:
    size: int
    colour: str


SCHEMA = {
    "type": "object",
    "properties": {
        "size": {"type": "integer", "minimum": 30, "maximum": 60},
        "colour": {"enum": ["red", "green", "blue"]},
    },
    "required": ["size", "colour"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "shirt", "schema": SCHEMA}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", help="default: the first one that the server has")
    parser.add_argument("--prompt", default="shirt = ")
    args = parser.parse_args()
    client = OpenAI(base_url=args.url, api_key=os.environ.get("SPECDEC_API_KEY", "none"))
    model = args.model or client.models.list().data[0].id
    for seed in range(3):
        answer = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": args.prompt}],
            response_format=FORMAT,
            max_tokens=64,
            seed=seed,
        )
        print(Shirt(**json.loads(answer.choices[0].message.content)))


if __name__ == "__main__":
    main()
