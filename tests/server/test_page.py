"""The page in a real browser: it writes, colours, draws, races and replays, with the keyboard alone, and asks nobody else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("websockets")

from browser import CHROMIUM, Browser
from serving import Served

from outrider.cli.main import main

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here; apt-get install chromium")]
_ENTER, _ESCAPE, _CONTROL = 13, 27, 2


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served() as server:
        yield server


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture()
def browser(chromium: Browser) -> Browser:
    chromium.problems, chromium.addresses = [], []
    return chromium


def _is_done(status: str) -> str:
    return f"document.getElementById('status').textContent === '{status}'"


def _open(browser: Browser, served: Served) -> None:
    """Open the page and wait until it knows the methods."""
    browser.open(served.address)
    browser.until("document.getElementById('method').options.length > 3")


def test_typed_prompt_becomes_coloured_tokens(served: Served, browser: Browser, tmp_path: Path) -> None:
    _open(browser, served)
    browser.value("document.getElementById('tokens').value = 60; document.getElementById('guesses').value = 4")
    browser.value("document.getElementById('length').value = 'most'")
    browser.value("document.getElementById('method').value = 'draft-tree'; document.getElementById('prompt').value = ''")
    browser.value("document.getElementById('prompt').focus()")
    browser.type("One day, a little cat")
    browser.press("Enter", code=_ENTER, modifiers=_CONTROL)
    browser.until(_is_done("Done."))
    origins = browser.value("[...document.querySelectorAll('.answer .t')].map(node => node.classList[1])")
    assert 20 <= len(origins) <= 60 and set(origins) <= {"accepted", "recovered", "bonus"}
    assert browser.value("document.querySelectorAll('#tree svg rect').length") >= 1
    assert "guessed" in browser.value("document.getElementById('tree-text').textContent")
    assert float(browser.value("document.getElementById('g-pass').textContent")) >= 1
    for scheme in ("light", "dark"):
        browser.prefer(scheme)
        browser.picture(tmp_path / f"{scheme}.png")
    assert (tmp_path / "light.png").read_bytes() != (tmp_path / "dark.png").read_bytes()
    assert not browser.problems
    assert all(address.startswith(served.address) for address in browser.addresses)


def test_race_finishes_with_identical_texts(served: Served, browser: Browser) -> None:
    _open(browser, served)
    browser.value("document.getElementById('tokens').value = 40; document.getElementById('go').click()")
    browser.until(_is_done("Done."))
    browser.value("document.getElementById('race').click()")
    browser.until("document.getElementById('race-result').textContent.includes('as fast')")
    assert "the texts are identical" in browser.value("document.getElementById('race-result').textContent")
    assert browser.value("document.getElementById('plain-bar').value") == 1
    assert browser.value("document.getElementById('fast-bar').value") == 1
    browser.value("document.getElementById('at').value = 1; document.getElementById('at').dispatchEvent(new Event('input'))")
    assert browser.value("document.getElementById('tree-text').textContent").startswith("Round 1:")
    assert not browser.problems


def test_a_forced_length_is_kept_and_the_reason_is_told(served: Served, browser: Browser) -> None:
    _open(browser, served)
    browser.value("$('length').value = 'exactly'; setLength(); $('guesses').value = 3; $('tokens').value = 30; $('go').click()")
    browser.until(_is_done("Done."))
    assert browser.value("rounds.slice(0, 3).map(round => round.tokens.length - 1)") == [3, 3, 3]
    assert "given" in browser.value("$('reasons').textContent")
    browser.value("drawRound(1)")
    assert browser.value("$('tree-why').textContent") == "The draft length is fixed at 3."
    browser.value("$('kept').firstChild.click()")
    assert browser.value("$('tree-text').textContent").startswith("Round 1:")
    browser.value("$('guesses').value = 0; $('prompt').value = 'One day'; $('go').click()")
    browser.until(_is_done("Done."))
    browser.value("drawRound(1)")
    why = browser.value("$('tree-why').textContent")
    assert why == "Nothing was guessed. The request allows at most 0 guesses."
    assert not browser.problems


def test_requests_at_once_share_passes(served: Served, browser: Browser) -> None:
    _open(browser, served)
    browser.value("$('many').value = 3; $('tokens').value = 40; $('go').click()")
    browser.until(_is_done("Done."))
    assert browser.value("[...document.querySelectorAll('.answer')].filter(node => node.textContent).length") == 3
    assert browser.value("Math.max(...[...passes.values()].map(one => one.rounds.length))") == 3
    assert browser.value("document.querySelectorAll('#passes rect').length") >= 3
    assert not browser.problems


def test_all_methods_race_to_the_same_text(served: Served, browser: Browser) -> None:
    _open(browser, served)
    browser.value("known.methods = ['plain', 'draft-model', 'draft-tree', 'suffix']; $('tokens').value = 24")
    browser.value("$('race-all').click()")
    browser.until("$('all-result').textContent.includes('4 methods')")
    assert "all texts are identical" in browser.value("$('all-result').textContent")
    rows = browser.value("[...document.querySelectorAll('#chart th')].map(node => node.textContent)")
    assert sorted(rows) == ["draft-model", "draft-tree", "plain", "suffix"]
    widths = browser.value("[...document.querySelectorAll('#chart .bar')].map(node => parseFloat(node.style.width))")
    assert widths[0] == 100 and widths == sorted(widths, reverse=True)
    browser.call("Emulation.setDeviceMetricsOverride", width=390, height=844, deviceScaleFactor=1, mobile=False)
    assert browser.value("document.documentElement.scrollWidth") <= 390, "a telephone shows all of it"
    assert browser.value("Math.max(...[...document.querySelectorAll('#chart .bar')].map(node => node.clientWidth))") > 200
    browser.call("Emulation.clearDeviceMetricsOverride")
    assert not browser.problems


def test_escape_stops_a_race(served: Served, browser: Browser) -> None:
    _open(browser, served)
    browser.value("$('race-all').click()")
    browser.until("$('all-result').textContent.includes('Measuring')")
    browser.press("Escape", code=_ESCAPE)
    browser.until(_is_done("Stopped."))


def test_escape_stops(served: Served, browser: Browser) -> None:
    _open(browser, served)
    browser.value("document.getElementById('tokens').value = 900; document.getElementById('go').click()")
    browser.until("document.querySelectorAll('.answer .t').length > 5")
    browser.press("Escape", code=_ESCAPE)
    browser.until(_is_done("Stopped."))


def test_errors_are_told(served: Served, browser: Browser) -> None:
    _open(browser, served)
    browser.value("document.getElementById('tokens').value = 999999; document.getElementById('go').click()")
    browser.until("document.getElementById('status').textContent.includes('at most 4096')")


def test_every_control_has_a_name(served: Served, browser: Browser) -> None:
    browser.open(served.address)
    nodes = browser.call("Accessibility.getFullAXTree")["nodes"]
    controls = {"button", "textbox", "combobox", "spinbutton", "progressbar", "ProgressIndicator", "slider", "log"}
    seen = [node for node in nodes if node.get("role", {}).get("value") in controls and not node["ignored"]]
    assert len(seen) >= 12
    for node in seen:
        assert node.get("name", {}).get("value"), node


def test_a_recorded_trace_replays(browser: Browser, tmp_path: Path) -> None:
    first = {"request": 0, "position": 0, "tokens": [1, 2, 3, 4], "parents": [-1, 0, 0, 1], "path": [1], "emitted": [2, 9]}
    first |= {"origins": ["accepted", "recovered"], "draft_seconds": 0.001, "score_seconds": 0.002, "seconds": 0.004}
    second = {**first, "position": 2, "tokens": [9], "parents": [-1], "path": [], "emitted": [5], "origins": ["bonus"]}
    trace = tmp_path / "trace.jsonl"
    trace.write_text(json.dumps(first) + "\n" + json.dumps(second) + "\n")
    assert main(["viz", str(trace)]) == 0
    browser.open(f"file://{tmp_path / 'trace.html'}")
    assert browser.value("document.getElementById('talk').textContent") == "[2][9][5]"
    browser.value("at.value = 1; at.dispatchEvent(new Event('input'))")
    assert browser.value("document.getElementById('talk').textContent") == "[2][9]"
    assert browser.value("document.querySelectorAll('#tree rect').length") == 5
    assert not browser.problems


def test_an_image_grows(browser: Browser, tmp_path: Path) -> None:
    assert main(["imagine", "--class", "3", "--method", "gsd", "--show", "--out", str(tmp_path / "three.png")]) == 0
    browser.open(f"file://{tmp_path / 'three.html'}")
    covered = "[...document.querySelectorAll('rect.waiting')].filter(rect => rect.style.display !== 'none').length"
    browser.value("stop(); at(0)")
    assert browser.value(covered) == 49
    browser.value("at(most)")
    assert browser.value(covered) == 0
    assert browser.value("document.querySelector('figcaption').textContent").startswith("49 of 49 codes")
    bars = "[...document.querySelectorAll('.bars rect')].map(rect => rect.getBoundingClientRect())"
    assert browser.value(f"{bars}.filter(box => box.width > 4 && box.height > 4).length") == 7, "a bar for each row is seen"
    assert not browser.problems
    assert all(address.startswith(("file:", "data:")) for address in browser.addresses), "the page asks nobody"
