"""The playground in a real browser: -m browser, with the extra test-browser and a Chromium.

Nothing but the server's own address may be asked for, and the console must stay silent.
"""

import time

import pytest

PROMPT = "def fibonacci(n):"
KINDS = ("accepted", "rejected", "recovered", "bonus")
INSTALL = 'playwright is missing: pip install -c constraints.txt -e ".[test-browser]"'
# the contrast of an element's text with what it stands on, by WCAG 2
CONTRAST = """element => {
  const light = color => {
    const parts = color.match(/[\\d.]+/g).slice(0, 3).map(part => part / 255)
      .map(part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
  };
  const isClear = found => getComputedStyle(found).backgroundColor === "rgba(0, 0, 0, 0)";
  let back = element;
  while (isClear(back)) back = back.parentElement;
  const a = light(getComputedStyle(element).color);
  const b = light(getComputedStyle(back).backgroundColor);
  return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
}"""

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def browser():
    """A missing browser is a failure: these tests run only where they are asked for."""
    try:
        from tests.specdec.serve.http.browser import open_browser
    except ModuleNotFoundError as error:
        pytest.fail(f"{INSTALL} ({error})")
    try:
        with open_browser() as found:
            yield found
    except SystemExit as error:
        pytest.fail(str(error))


class Watched:
    """Pages of one browser, with what they write to the console and what they ask of others."""

    def __init__(self, browser) -> None:
        self._browser = browser
        self.messages: list[str] = []
        self.foreign: list[str] = []

    def open(self, url: str, width: int = 1280, scheme: str = "light"):
        """A new page, cut off from every other host."""
        page = self.blank(width, scheme)
        self._cut_off(page, url)
        page.goto(url)
        return page

    def blank(self, width: int = 1280, scheme: str = "light"):
        """One that has loaded nothing."""
        page = self._browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
        page.set_default_timeout(20_000)
        page.on("console", lambda message: self.messages.append(message.text))
        page.on("pageerror", lambda error: self.messages.append(str(error)))
        return page

    def _cut_off(self, page, url: str) -> None:
        def pass_on(route) -> None:
            if route.request.url.startswith(url):
                route.continue_()
            else:
                self.foreign.append(route.request.url)
                route.abort()

        page.route("**/*", pass_on)


@pytest.fixture
def watched(browser):
    """Silent and alone at the end."""
    found = Watched(browser)
    yield found
    assert found.messages == []
    assert found.foreign == []


def ask(page, prompt: str = PROMPT, **options: object) -> None:
    """Fill in the options, send, and return at once."""
    for name, value in {"temperature": 0.8, "seed": 7, "max_tokens": 60, **options}.items():
        page.fill(f"#{name}", str(value))
    page.fill("#prompt", prompt)
    page.press("#prompt", "Control+Enter")


def kept(pane) -> str:
    """The text of an answer without its rejected drafts."""
    parts = pane.locator(".text span span:not(.rejected)").all_text_contents()
    return "".join(parts)


def last_pane(page):
    """Of the last answer, once it has ended."""
    pane = page.locator(".pane").last
    pane.locator(".figures li").first.wait_for()
    return pane


def test_drafts_are_coloured_and_speculation_changes_no_text(live, watched):
    page = watched.open(live.url)
    page.get_by_label("Completion").check(force=True)
    ask(page)
    drafted = last_pane(page)
    for kind in KINDS:
        assert drafted.locator(f".{kind}").count() > 0
    expected = live.completion(PROMPT, temperature=0.8, seed=7, max_tokens=60)
    assert kept(drafted) == expected["choices"][0]["text"]
    assert "seed 7" in drafted.locator(".figures").text_content()
    with_draft = kept(drafted)

    page.get_by_label("Off").check(force=True)
    ask(page)
    page.locator(".turn").nth(1).wait_for()
    plain = last_pane(page)
    assert plain.get_attribute("aria-label") == "Without speculation"
    assert kept(plain) == with_draft
    assert [plain.locator(f".{kind}").count() for kind in KINDS] == [0, 0, 0, 0]


def test_both_run_side_by_side_and_the_page_says_that_they_are_equal(live, watched):
    page = watched.open(live.url)
    page.get_by_label("Compare").check(force=True)
    ask(page)
    page.locator(".verdict").wait_for()
    left, right = page.locator(".pane").all()
    assert kept(left) == kept(right) != ""
    assert page.locator(".verdict.same").text_content().startswith("The same text, token for token")
    left_box, right_box = left.bounding_box(), right.bounding_box()
    assert left_box["y"] == right_box["y"]
    assert left_box["x"] + left_box["width"] <= right_box["x"]


def test_a_model_without_a_trained_template_opens_in_completion(live, watched):
    page = watched.open(live.url)
    page.locator("#model span").wait_for()
    assert page.get_by_label("Completion").is_checked()
    assert page.locator("#system-field").is_hidden()
    count = live.llm.llm.sizes.num_speculative_tokens
    assert f"draft demo, K = {count}" in page.locator("#model").text_content()
    assert page.locator("#num_speculative_tokens").get_attribute("placeholder") == str(count)
    page.get_by_label("Chat").check(force=True)
    assert page.locator("#system-field").is_visible()


def test_a_mode_that_the_reader_chose_is_kept(live, watched):
    page = watched.blank()
    held = []
    page.route("**/v1/models", lambda route: held.append(route))
    page.goto(live.url)
    while not held:
        page.wait_for_timeout(20)
    page.locator("input[value=completion]").check(force=True)
    page.get_by_label("Chat").check(force=True)
    held[0].continue_()
    page.locator("#model span").wait_for()
    assert page.get_by_label("Chat").is_checked()


def test_a_model_with_roles_in_its_template_opens_in_chat(serve, watched):
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    with serve(chat_template=template) as chatting:
        page = watched.open(chatting.url)
        page.locator("#model span").wait_for()
        assert page.get_by_label("Chat").is_checked()


@pytest.mark.parametrize(
    "card, words",
    [
        (
            {"draft": "a/b", "num_speculative_tokens": 8, "is_adaptive": True},
            "draft a/b, K up to 8",
        ),
        (None, "no draft"),
    ],
)
def test_what_drafts_is_said(live, watched, card, words):
    def of_another(route) -> None:
        found = route.fetch()
        body = found.json()
        body["data"][0]["speculation"] = card
        route.fulfill(response=found, json=body)

    page = watched.blank()
    page.route("**/v1/models", of_another)
    page.goto(live.url)
    page.locator("#model span").wait_for()
    assert words in page.locator("#model").text_content()


VERDICT = """async ([drafted, plain]) => {
  const { verdict } = await import("/page/run.js");
  const run = (speed) => ({ tokenIds: [1, 2], text: "a", finishReason: "length", speed });
  return verdict(run(drafted), run(plain));
}"""


@pytest.mark.parametrize(
    "speeds, kind, words",
    [
        ([20, 10], "same", "With speculation: 2.00 times the speed."),
        ([10, 10], "same", "With speculation: 1.00 times the speed."),
        ([8, 10], "slower", "With speculation it was slower: 0.80 times the speed."),
        ([9.96, 10], "same", "1.00 times the speed."),
        ([None, 10], "same", "token for token (2)."),
    ],
)
def test_a_slow_down_is_no_success(live, watched, speeds, kind, words):
    found = watched.open(live.url).evaluate(VERDICT, speeds)
    assert found["kind"] == kind
    assert found["text"].endswith(words)


def test_a_slow_down_is_shown_without_the_colour_of_success(live, watched):
    page = watched.open(live.url)

    def late(route) -> None:
        if route.request.post_data_json["speculate"]:
            body = route.request.post_data_json
            route.continue_(post_data={**body, "num_speculative_tokens": 0})
        else:
            route.continue_()

    page.route("**/v1/completions", late)
    page.get_by_label("Compare").check(force=True)
    page.evaluate(
        """async () => {
          const { Run } = await import("/page/run.js");
          Object.defineProperty(Run.prototype, "speed",
            { get() { return this.speculates ? 8 : 10; } });
        }"""
    )
    ask(page)
    shown = page.locator(".verdict.slower")
    shown.wait_for()
    assert shown.evaluate(CONTRAST) >= 4.5
    colours = "element => getComputedStyle(element).backgroundColor"
    accepted = page.locator("#legend .accepted").evaluate(colours)
    assert shown.evaluate(colours) != accepted


def test_texts_that_differ_are_said_to(live, watched):
    page = watched.open(live.url)
    page.get_by_label("Chat").check(force=True)
    page.get_by_label("Compare").check(force=True)

    def other_seed(route) -> None:
        body = route.request.post_data_json
        seed = 8 if not body["speculate"] else 7
        route.continue_(post_data={**body, "seed": seed})

    page.route("**/v1/chat/completions", other_seed)
    ask(page)
    assert "The texts differ from token" in page.locator(".verdict.differ").text_content()


def test_the_charts_show_the_rounds(live, watched):
    page = watched.open(live.url)
    assert "no rounds yet" in page.locator("#rounds-chart").text_content()
    ask(page, num_speculative_tokens=2)
    figures = last_pane(page).locator(".figures").text_content()
    page.locator("#rounds-chart .mean").wait_for(state="attached")
    mean = page.locator("#mean").text_content().removeprefix("mean ")
    assert f"{mean} tokens a round" in figures
    positions = page.locator("#positions-chart")
    assert positions.locator(".tick.middle").all_text_contents() == ["1", "2"]
    rates = [
        int(text.rstrip("%")) / 100
        for text in positions.locator(".value, .inside").all_text_contents()
    ]
    assert float(mean) == pytest.approx(1 + sum(rates), abs=0.02)
    assert "share of rounds" in positions.text_content()


def test_escape_ends_an_answer_on_the_server_too(live, watched):
    page = watched.open(live.url)
    ask(page, max_tokens=480, temperature=0, num_speculative_tokens=0)
    page.locator(".round").nth(2).wait_for()
    assert page.locator("#send").is_disabled()
    page.keyboard.press("Escape")
    assert "stopped" in last_pane(page).locator(".figures").text_content()
    live.until_idle()
    assert page.locator("#send").is_enabled()
    assert len(kept(last_pane(page))) < len(
        live.completion(PROMPT, temperature=0, max_tokens=480)["choices"][0]["text"]
    )


def test_a_conversation_goes_on(live, watched):
    page = watched.open(live.url)
    page.locator("#model span").wait_for()
    page.get_by_label("Chat").check(force=True)
    page.fill("#system", "Write code.")
    bodies = []
    page.on(
        "request", lambda each: bodies.append(each.post_data_json) if each.method == "POST" else 0
    )
    page.fill("#max_tokens", "12")
    page.fill("#prompt", "first")
    page.press("#prompt", "Shift+Enter")
    page.press("#prompt", "Enter")
    first = kept(last_pane(page))
    page.fill("#prompt", "second")
    page.press("#prompt", "Enter")
    page.locator(".turn").nth(1).wait_for()
    last_pane(page)
    assert bodies[1]["messages"] == [
        {"role": "system", "content": "Write code."},
        {"role": "user", "content": "first\n"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "second"},
    ]
    page.get_by_role("button", name="Clear").click()
    assert page.locator(".turn").count() == 0
    assert page.locator("#empty").is_visible()


def test_markup_in_a_text_stays_text(live, watched):
    page = watched.open(live.url)
    markup = "<img src=x onerror=alert(1)>"
    ask(page, prompt=markup, max_tokens=2)
    last_pane(page)
    assert page.locator(".given .text").text_content() == markup
    assert page.locator("img").count() == 0


def test_an_error_of_the_server_is_shown_in_words(live, browser):
    watched = Watched(browser)  # a refused request is a message of the browser's own
    page = watched.open(live.url)
    ask(page, top_p=3)
    shown = page.locator(".pane [role=alert]").text_content()
    assert shown.startswith("The server refused this: top_p=3")
    assert page.input_value("#prompt") == PROMPT
    page.fill("#top_p", "")
    page.press("#prompt", "Control+Enter")
    page.locator(".turn").nth(1).wait_for()
    assert kept(last_pane(page))
    assert watched.foreign == []


def test_the_key_is_asked_for_and_kept_in_memory_only(serve, browser):
    with serve(api_key="sk-one") as locked:
        watched = Watched(browser)
        page = watched.open(locked.url)
        dialog = page.get_by_role("dialog")
        dialog.get_by_label("API key").fill("sk-two")
        dialog.get_by_role("button").click()
        assert "does not take this key" in dialog.get_by_role("alert").text_content()
        dialog.get_by_label("API key").fill("sk-one")
        dialog.get_by_role("button").click()
        dialog.wait_for(state="hidden")
        ask(page, max_tokens=4)
        assert kept(last_pane(page))
        kept_by_browser = page.evaluate(
            "() => JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])"
        )
        assert "sk-one" not in kept_by_browser + page.content()
        page.reload()
        dialog.wait_for()
        assert all("401" in message for message in watched.messages)


@pytest.mark.parametrize("width", [1280, 1000, 400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_can_be_read_in_both_themes_at_every_width(live, watched, width, scheme):
    page = watched.open(live.url, width, scheme)
    if width == 400:
        page.locator("summary").click()
    page.get_by_label("Compare").check(force=True)
    ask(page)
    page.locator(".verdict").wait_for()
    assert page.evaluate("() => document.documentElement.scrollWidth") == width
    selectors = [*(f".pane .{kind}" for kind in KINDS), ".verdict", ".figures li", ".hint"]
    selectors += [".model", "#send", ".options label", "figcaption output", ".speed", ".primary"]
    for selector in selectors:
        assert page.locator(selector).first.evaluate(CONTRAST) >= 4.5, selector
    background = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    page.select_option("#theme", "light" if scheme == "dark" else "dark")
    assert background != page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    page.reload()  # the choice is kept
    assert background != page.evaluate("() => getComputedStyle(document.body).backgroundColor")


def test_every_control_is_reached_by_the_keyboard_and_shows_it(live, watched):
    page = watched.open(live.url)
    seen = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        name, width = page.evaluate(
            """() => {
              const found = document.activeElement;
              if (found === document.body) return ["the browser's own", "2px"];
              const shown = found.type === "radio" ? found.nextElementSibling : found;
              return [found.id || found.value || found.textContent,
                      getComputedStyle(shown).outlineWidth];
            }"""
        )
        assert width == "2px", name
        seen.add(name)
    assert {
        "completion",
        "on",
        "temperature",
        "seed",
        "stop",
        "prompt",
        "send",
        "theme",
        "show-drafts",
    } <= seen


def test_a_server_that_is_gone_is_said_to_be(serve, browser):
    watched = Watched(browser)
    with serve() as gone:
        page = watched.open(gone.url)
        page.locator("#model span").wait_for()
    ask(page)
    shown = page.locator(".pane [role=alert]")
    end = time.monotonic() + 20
    while not shown.count():
        assert time.monotonic() < end
        page.wait_for_timeout(50)
    assert shown.text_content() == "The server does not answer. Is it still running?"
