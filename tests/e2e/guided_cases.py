"""What texts have to follow: 30 JSON schemas, regexes, choices and two Lark grammars."""

WORD = {"type": "string", "pattern": "^[a-z]{1,8}$"}
SMALL = {"type": "integer", "minimum": 0, "maximum": 99}
FLAG = {"type": "boolean"}


def obj(required=None, **properties):
    """An object with these properties and no others; all are required unless some are named."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required is None else required,
        "additionalProperties": False,
    }


def array(items, low=0, high=4):
    return {"type": "array", "items": items, "minItems": low, "maxItems": high}


SCHEMAS = {
    "integer": SMALL,
    "boolean": FLAG,
    "null": {"type": "null"},
    "constant": {"const": {"kind": "fixed", "size": 3}},
    "enum of strings": {"enum": ["red", "green", "dark blue"]},
    "enum of several types": {"enum": [1, "one", None, True, 1.5]},
    "number with bounds": {"type": "number", "minimum": -1, "exclusiveMaximum": 2.5},
    "negative integer": {"type": "integer", "minimum": -250, "maximum": -3},
    "multiple": {"type": "integer", "minimum": 0, "maximum": 100, "multipleOf": 5},
    "short string": {"type": "string", "minLength": 2, "maxLength": 12},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
    "date": {"type": "string", "format": "date"},
    "uuid": {"type": "string", "format": "uuid"},
    "ip address": {"type": "string", "format": "ipv4"},
    "flat object": obj(name=WORD, age=SMALL, member=FLAG),
    "optional properties": obj(["id"], id=SMALL, note=WORD, done=FLAG),
    "nested objects": obj(user=obj(name=WORD, address=obj(city=WORD, code=SMALL))),
    "array of integers": array(SMALL, 1, 5),
    "array of objects": array(obj(x=SMALL, y=SMALL), 1, 3),
    "array of arrays": array(array(FLAG, 1, 2), 1, 3),
    "tuple": {
        "type": "array",
        "prefixItems": [WORD, SMALL, FLAG],
        "items": False,
        "minItems": 3,
        "maxItems": 3,
    },
    "union of types": {"type": ["integer", "null", "boolean"], "minimum": 0, "maximum": 9},
    "any of": {"anyOf": [obj(cat=WORD), obj(dog=SMALL), {"type": "null"}]},
    "one of, told by a constant": {
        "anyOf": [
            obj(kind={"const": "circle"}, radius=SMALL),
            obj(kind={"const": "box"}, width=SMALL, height=SMALL),
        ]
    },
    "all of": {
        "allOf": [
            {"type": "object", "properties": {"a": SMALL}, "required": ["a"]},
            {"type": "object", "properties": {"b": FLAG}, "required": ["b"]},
        ],
        "additionalProperties": False,
        "properties": {"a": SMALL, "b": FLAG},
    },
    "reference": {
        "$defs": {"point": obj(x=SMALL, y=SMALL)},
        **obj(start={"$ref": "#/$defs/point"}, end={"$ref": "#/$defs/point"}),
    },
    "linked list": {
        "$defs": {
            "node": obj(value=SMALL, next={"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]})
        },
        "$ref": "#/$defs/node",
    },
    "tree": {
        "$defs": {"tree": obj(leaf=FLAG, children=array({"$ref": "#/$defs/tree"}, 0, 2))},
        "$ref": "#/$defs/tree",
    },
    "map": {
        "type": "object",
        "additionalProperties": SMALL,
        "minProperties": 1,
        "maxProperties": 3,
    },
    "tool call": obj(
        name={"enum": ["search", "open"]},
        arguments=obj(query={"type": "string", "maxLength": 16}, limit=SMALL),
    ),
}
REGEXES = (
    r"[0-9]{3}-[0-9]{4}",
    r"(yes|no)( (yes|no)){2,4}",
    r"[a-z]{1,10}@[a-z]{1,8}\.(com|org)",
    r"#[0-9a-f]{6}",
)
CHOICES = (
    ["positive", "neutral", "negative"],
    ['say "no"', "C:\\path", "two\nlines", "caf\N{LATIN SMALL LETTER E WITH ACUTE}"],
)
ARITHMETIC = """
start: term ((" + " | " - ") term)~0..3
term: NUMBER | "(" start ")"
NUMBER: /[0-9]{1,3}/
"""
QUERY = """
start: "SELECT " columns " FROM " NAME (" WHERE " NAME " = " NUMBER)? ";"
columns: "*" | NAME ("," NAME)~0..2
NAME: /[a-z]{1,8}/
NUMBER: /[0-9]{1,4}/
"""
GRAMMARS = (ARITHMETIC, QUERY)

CASES = (
    [{"json": schema} for schema in SCHEMAS.values()]
    + [{"regex": regex} for regex in REGEXES]
    + [{"choice": choice} for choice in CHOICES]
    + [{"grammar": grammar} for grammar in GRAMMARS]
)
