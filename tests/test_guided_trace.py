"""The script that traces grammars; it needs the extra that has them."""

import threading

from scripts.guided_trace import recorded_walks
from specdec.guided.guides import Guides
from specdec.requests.structured_outputs import StructuredOutputsParams
from specdec.requests.tokenizer import Tokenizer
from weights.demo import demo_directory


def test_walks_of_guides_are_recorded():
    guides = Guides(Tokenizer(demo_directory("target")), 4100, [1])
    guide = guides.compile(StructuredOutputsParams(regex="ab+"))
    with recorded_walks() as walks:
        assert len(guide.masks(())) == 1

    [walk] = walks
    assert walk.wall > 0
    assert walk.thread == threading.get_ident()
