"""Grammars that are wrong, or made to cost much, as a request would give them."""

DEEP = '{"type":"array","items":' * 5000 + '{"type":"integer"}' + "}" * 5000
CHAIN = {
    "$ref": "#/$defs/0",
    "$defs": {str(i): {"items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(2500)}
    | {"2500": {"type": "null"}},
}
RULES = "start: r0\n" + "\n".join(f'r{i}: r{i + 1} r{i + 1} | "a"' for i in range(4000))
TERMINALS = "start: T0\n" + "\n".join(f'T{i}: "a" T{i + 1} | "a"' for i in range(5000))

# after n times "a", the row of a "b" would have 900 n items, which are compared pairwise
ROWS = 'start: l\nl: "a" m | "b"\nm: l | ' + " | ".join(f'l "{i:04d}"' for i in range(900))

# what the compiler must refuse, and a word of its message
BAD = {
    "an unclosed group": ({"regex": "(a|b"}, "unclosed group"),
    "a lookahead": ({"regex": "a(?=b)"}, "look-around"),
    "a backreference": ({"regex": r"(a)\1"}, "backreference"),
    "an unknown type": ({"json": {"type": "number?"}}, "Invalid type"),
    "an unknown keyword": ({"json": {"if": {}, "then": {}}}, "Unimplemented keys"),
    "a schema that is no JSON": ({"json": "{"}, ""),
    "a remote reference": ({"json": {"$ref": "https://example.com/a.json"}}, "does not fetch"),
    "a file reference": ({"json": {"$ref": "file:///etc/passwd"}}, "does not fetch"),
    "a missing reference": ({"json": {"$ref": "#/$defs/a"}}, ""),
    "nothing that matches": ({"json": {"type": "integer", "minimum": 5, "maximum": 4}}, ""),
    "deep nesting": ({"json": DEEP}, "recursion limit"),
    "no grammar": ({"grammar": "%%% start"}, "lexer error"),
    "no rule start": ({"grammar": 'a: "b"'}, "start"),
    "a missing rule": ({"grammar": "start: b"}, "b"),
    "deep parentheses": ({"grammar": "start: " + "(" * 9999 + '"a"' + ")" * 9999}, "nested"),
    "an import": ({"grammar": "%import os.path\nstart: PATH"}, "import"),
    "too long": ({"grammar": "// " + "x" * (1 << 17) + '\nstart: "a"'}, "at most"),
    "many choices": ({"choice": [f"choice {i}" for i in range(20_000)]}, "at most"),
    "a missing last rule": ({"grammar": RULES}, "r4000"),
}
# what may work or be refused, in bounded time, and never ends the process
COSTLY = {
    "a huge repeat": {"regex": "((a{1000}){1000}){1000}"},
    "catastrophic backtracking elsewhere": {"regex": "(a+)+b"},
    "many alternatives with a tail": {"regex": "|".join(f"(a{i}.*){{3}}" for i in range(5000))},
    "a large automaton": {"regex": "(.*a.{20}){30}"},
    "a large enum": {"json": {"enum": [f"value {i}" for i in range(7000)]}},
    "many properties": {
        "json": {"type": "object", "properties": {f"p{i}": {} for i in range(5000)}}
    },
    "a chain of references": {"json": CHAIN},
    "a chain of rules": {"grammar": RULES + '\nr4000: "b"'},
    "a chain of terminals": {"grammar": TERMINALS + '\nT5000: "b"'},
    "a schema that contains itself": {"json": {"$ref": "#"}},
    "rows that grow": {"grammar": ROWS},
    "an ambiguous grammar": {"grammar": 'start: start start | "a" | ""'},
}
