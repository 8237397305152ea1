"""The files of the playground: what they are sent with, and that they obey the server's own policy.

What the page does is in test_playground_browser.py.
"""

import re
from html.parser import HTMLParser

import pytest

from specdec import SpeculativeConfig
from specdec.serve.engine_thread import draft_name
from specdec.serve.http.gate import FOLDER, PAGE_PATHS
from specdec.serve.http.options import ServerOptions
from specdec.serve.http.prompts import Prompts

FILES = sorted(FOLDER.iterdir())
NAMESPACE = "http://www.w3.org/2000/svg"  # a name, which no browser fetches
KINDS = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


class Page(HTMLParser):
    """What a page loads, what of it is inline, and which of its controls have labels."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.inline: list[str] = []
        self.ids: set[str] = set()
        self.unlabelled: list[object] = []
        self.labelled: set[str] = set()
        self._num_labels = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.loaded += [given[name] for name in ("src", "href") if name in given]
        self.inline += [name for name in given if name == "style" or name.startswith("on")]
        self.inline += [tag] if tag == "style" or (tag == "script" and "src" not in given) else []
        self.ids |= {given["id"]} if "id" in given else set()
        if tag == "label":
            self._num_labels += 1
            self.labelled |= {given["for"]} if "for" in given else set()
        elif tag in ("input", "select", "textarea") and not self._num_labels:
            self.unlabelled.append(given.get("id"))

    def handle_endtag(self, tag: str) -> None:
        self._num_labels -= tag == "label"


@pytest.fixture(scope="module")
def page() -> Page:
    return Page((FOLDER / "index.html").read_text())


def test_the_page_and_all_its_files_are_served(live, page):
    found = live.get("/")
    assert (found.status_code, found.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert {*page.loaded} <= PAGE_PATHS
    for path in sorted(PAGE_PATHS - {"/", "/page/index.html"}):
        found = live.get(path)
        assert found.status_code == 200
        assert found.headers["content-type"].startswith(KINDS[path[path.rindex(".") :]])
        assert found.content == (FOLDER / path.removeprefix("/page/")).read_bytes()


@pytest.mark.parametrize("path", ["/", "/page/main.js"])
def test_what_a_page_may_do_is_bounded(live, path):
    headers = live.get(path).headers
    assert headers["content-security-policy"] == "default-src 'self'"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["x-frame-options"] == "DENY"
    assert headers["cache-control"] == "no-cache"


def test_a_file_that_a_browser_has_is_not_sent_again(live):
    etag = live.get("/page/main.js").headers["etag"]
    found = live.get("/page/main.js", headers={"If-None-Match": etag})
    assert (found.status_code, found.headers["cache-control"]) == (304, "no-cache")


def test_the_page_obeys_the_policy(page):
    assert page.inline == []
    assert page.unlabelled == [each for each in page.unlabelled if each in page.labelled]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_nothing_foreign_is_loaded_and_no_text_becomes_markup(file):
    text = file.read_text().replace(NAMESPACE, "")
    assert re.findall(r"(?:https?:)?//[\w.]+\.\w+|data:[\w/]+[;,]|@import", text) == []
    assert (
        re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", text) == []
    )


def test_every_element_that_a_script_asks_for_exists(page):
    for file in FOLDER.glob("*.js"):
        asked = re.findall(r"""(?:\bat|getElementById)\("([\w-]+)"\)""", file.read_text())
        assert set(asked) <= page.ids, file.name
    names = re.search(r"NUMBERS = \[(.*?)\]", (FOLDER / "options.js").read_text(), re.DOTALL)[1]
    assert set(re.findall(r'"(\w+)"', names)) <= page.ids


def test_the_page_is_told_whether_the_model_chats_and_what_drafts(live):
    [card] = live.get("/v1/models").json()["data"]
    assert card["is_chat_model"] is False  # the bundled template was never trained
    sizes = live.llm.llm.sizes
    assert card["speculation"] == {
        "draft": "demo",
        "num_speculative_tokens": sizes.num_speculative_tokens,
        "is_adaptive": sizes.is_adaptive,
    }
    assert live.get("/v1/models/demo").json() == card


@pytest.mark.parametrize(
    "template, is_chat_model",
    [
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}", True),
        ("{% for m in messages %}{{ m['role'] }}: {{ m.content }}{% endfor %}", True),
        ("{{ messages[-1].content }}", False),
        (None, False),
    ],
)
def test_a_template_that_reads_no_roles_was_not_trained(live, template, is_chat_model):
    options = ServerOptions(host="127.0.0.1", model_names=("demo",), chat_template=template)
    tokenizer = live.server.application.chats._prompts.tokenizer
    assert Prompts(tokenizer, 9, options).tells_roles_apart == is_chat_model


@pytest.mark.parametrize(
    "model, name", [("demo", "demo"), ("owner/name", "owner/name"), (FOLDER, "page"), (None, None)]
)
def test_a_draft_is_named_without_where_it_lies(model, name):
    assert draft_name(None if model is None else SpeculativeConfig(model)) == name


@pytest.mark.parametrize("path", ["/page/", "/page/../gate.py", "/page/%2e%2e/gate.py", "/page/x"])
def test_no_other_file_is_served(live, path):
    assert live.get(path).status_code == 404


def test_the_page_needs_no_key_and_what_it_calls_does(serve):
    with serve(api_key="sk-one") as locked:
        assert {locked.get(path).status_code for path in PAGE_PATHS} == {200}
        assert locked.get("/page/x").status_code == 401
        assert locked.get("/v1/models").status_code == 401
        assert locked.get("/", headers={"Host": "evil.example"}).status_code == 400
