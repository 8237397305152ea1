#!/usr/bin/env bash
# The server's routes by curl: a completion with a seed, a stream, a chat, and JSON that follows a schema.
#
#   specdec serve demo --draft demo       # in another terminal
#   bash examples/curl.sh [URL]
set -euo pipefail
url="${1:-http://127.0.0.1:8000}"

ask() { # route, body
  curl --silent --show-error --fail-with-body --no-buffer "$url$1" \
    -H "Content-Type: application/json" -H "x-api-key: ${SPECDEC_API_KEY:-none}" -d "$2"
  echo
}

ask /v1/completions '{"prompt": "def add(a, b):", "max_tokens": 24, "seed": 1}'
ask /v1/completions '{"prompt": "def add(a, b):", "max_tokens": 24, "seed": 1, "stream": true}'
ask /v1/chat/completions '{"messages": [{"role": "user", "content": "class Stack:"}], "max_tokens": 24, "temperature": 0}'
ask /v1/completions '{"prompt": "size = ", "max_tokens": 24, "temperature": 0, "structured_outputs": {"regex": "[1-9][0-9]?"}}'
