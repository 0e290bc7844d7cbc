"""The page of a report in a real browser, without a network. Skipped where no Chromium is installed."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
from measurements import settings_for

from eval.measure import measure

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Elements(HTMLParser):
    """Every element of a page with its attributes."""

    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))

    def of(self, tag, **attributes):
        return [a for t, a in self.found if t == tag and all(a.get(k) == v for k, v in attributes.items())]


def browse(page, *options):
    """What the browser made of a page, and what it complained about."""
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--window-size=1100,5000",
        "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={page.parent / 'profile'}", *options, page.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def test_the_page_stands_alone_and_shows_every_token_of_the_samples(measured):
    report, out, _ = measured
    text = (out / "report.html").read_text()
    page = Elements(text)
    assert all(image["src"].startswith("data:image/png;base64,") for image in page.of("img"))
    assert len(page.of("img")) == 3
    assert not page.of("script")
    assert not re.search(r"(src|href)=.https?:", text)
    for kind in ("accepted", "rejected", "own"):
        shown = [a for a in page.of("span", **{"class": kind}) if kind == "own" or "title" in a]
        assert len(shown) == sum(piece.kind == kind for sample in report.samples for piece in sample.pieces)


def test_text_of_a_prompt_cannot_become_part_of_the_page(tiny_target, tiny_draft, tmp_path):
    suite = tmp_path / "evil.jsonl"
    suite.write_text(json.dumps({"id": "<b>x</b>", "category": "|<i>", "prompt": "<script>alert(1)</script>"}) + "\n")
    measure(settings_for(tiny_target, tiny_draft, suite=suite), tmp_path / "out")
    page = Elements((tmp_path / "out" / "report.html").read_text())
    assert not page.of("script")
    assert not page.of("b")
    assert not page.of("i")


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium (apt install chromium)")
def test_a_browser_shows_the_page_without_a_complaint_and_without_a_network(measured, tmp_path):
    report, out, _ = measured
    page = tmp_path / "report.html"
    shutil.copy(out / "report.html", page)
    rendered, complaints = browse(page, "--dump-dom")
    assert not complaints
    assert report.verdict.line.split("—")[0].strip() in rendered
    assert len(Elements(rendered).of("div", **{"class": "sample"})) == len(report.samples)
    browse(page, f"--screenshot={tmp_path / 'page.png'}")
    assert (tmp_path / "page.png").stat().st_size > 50_000


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium (apt install chromium)")
def test_the_browser_would_complain_about_a_broken_page(tmp_path):
    page = tmp_path / "broken.html"
    page.write_text("<script>nowhere()</script><img src='https://example.org/x.png'>")
    assert len(browse(page, "--dump-dom")[1]) >= 1
