"""The built pages in headless Chromium, as wide as a desktop and as a phone, in light and dark. `make docs-check` runs this."""

from __future__ import annotations

import functools
import json
import shutil
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

SITE = Path(__file__).parents[2] / "site"
PAGES = sorted(path.name for path in SITE.glob("*.html")) or ["index.html"]  # which is missing where nobody ran `make docs`
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
WIDTHS = {"desktop": 1280, "phone": 390}
SCREEN, SCREENS = 800, 8  # pixels, and how many a page may have on a desktop
EVIDENCE = ("kernel-figures.html", "models.html")  # written by the code, as long as it is
# Of text and what is behind it, by WCAG 2.1: (L1 + 0.05) / (L2 + 0.05) of relative luminances; level AA asks for 4.5. Drawings are
# left out: what is behind their texts is no ancestor of them.
CONTRAST = """
const channel = c => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
const luminance = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
const rgba = text => text.match(/[\\d.]+/g).map(Number);
const behind = element => {
    for (; element; element = element.parentElement) {
        const colour = rgba(getComputedStyle(element).backgroundColor);
        if (colour.length === 3 || colour[3] > 0.5) return colour;
    }
    return [255, 255, 255];
};
const faint = [];
for (const element of document.querySelectorAll("article *:not(svg *, style)")) {
    const text = [...element.childNodes].filter(n => n.nodeType === 3).map(n => n.data.trim()).join("");
    const style = getComputedStyle(element);
    if (!text || !element.getClientRects().length || style.visibility === "hidden" || style.opacity === "0") continue;
    const [low, high] = [rgba(style.color), behind(element)].map(luminance).sort((a, b) => a - b);
    const ratio = (high + 0.05) / (low + 0.05);
    if (ratio < 4.5) faint.push(`${text.slice(0, 40)}: ${ratio.toFixed(2)}`);
}
return faint;
"""
MISSING = "return [...document.images].filter(i => !(i.complete && i.naturalWidth && i.alt)).map(i => i.src)"
DRAWN = """
const drawn = picture => picture.ariaLabel && picture.querySelector("svg").getBoundingClientRect().height > 50;
return [...document.querySelectorAll(".picture")].every(drawn);
"""
# How much wider the page is than its window, or than a box that scrolls all of its text: Furo has one on a phone.
SIDEWAYS = """
const boxes = [];
for (let box = document.querySelector("article"); box; box = box.parentElement)
    if (["auto", "scroll"].includes(getComputedStyle(box).overflowX)) boxes.push(box);
return Math.max(document.documentElement.scrollWidth - innerWidth, ...boxes.map(box => box.scrollWidth - box.clientWidth));
"""
# Columns of tables that end behind the edge of the box that scrolls them, by the table's heads.
CUT_OFF = """
const found = [];
for (const table of document.querySelectorAll("article table")) {
    let box = table;
    while (box && !["auto", "scroll"].includes(getComputedStyle(box).overflowX)) box = box.parentElement;
    const edge = box ? box.getBoundingClientRect().right + 1 : innerWidth;
    const heads = [...table.querySelectorAll("thead th")].slice(0, arguments[0]);
    const cut = heads.filter(head => head.getBoundingClientRect().right > edge).map(head => head.innerText);
    if (cut.length) found.push(cut.join(" | "));
}
return found;
"""
DECIDING = {"desktop": 99, "phone": 3}  # columns: all, and those that come first


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None: ...


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=SITE))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from selenium import webdriver

    assert CHROMIUM and DRIVER, "needs Chromium: apt-get install chromium chromium-driver"
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM or ""
    for argument in (
        *("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking"),
        *("disable-component-update", "disable-sync", f"user-data-dir={tmp_path_factory.mktemp('chromium')}"),
    ):
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.get("about:blank")
    driver.get_log("performance")  # the browser's own first page has requests too
    yield driver
    driver.quit()


def failed_requests(browser: Any) -> list[str]:
    """Of the page that was opened last: those without an answer, with an error for one, or to another host."""
    failed, asked = [], {}
    for entry in browser.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        parameters = message["params"]
        if message["method"] == "Network.requestWillBeSent":
            asked[parameters["requestId"]] = url = parameters["request"]["url"]
            failed += [f"elsewhere: {url}"] if not url.startswith(("http://127.0.0.1:", "data:")) else []
        elif message["method"] == "Network.loadingFailed":
            failed.append(f"{asked.get(parameters['requestId'])}: {parameters['errorText']}")
        elif message["method"] == "Network.responseReceived" and parameters["response"]["status"] >= 400:
            failed.append(f"{parameters['response']['url']}: {parameters['response']['status']}")
    return failed


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("page", PAGES)
def test_page(browser: Any, address: str, page: str, width: str, theme: str) -> None:
    command = browser.execute_cdp_cmd
    metrics = {"width": WIDTHS[width], "height": 844, "deviceScaleFactor": 1, "mobile": width == "phone"}
    command("Emulation.setDeviceMetricsOverride", metrics)
    command("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": theme}]})
    browser.get(f"{address}/{page}")
    assert browser.execute_script("return innerWidth") == WIDTHS[width]
    assert [entry["message"] for entry in browser.get_log("browser")] == []
    assert failed_requests(browser) == []
    assert browser.execute_script(MISSING) == [] and browser.execute_script(DRAWN)
    assert browser.execute_script(SIDEWAYS) <= 0, "the page scrolls sideways"
    assert browser.execute_script(CONTRAST) == []
    assert browser.execute_script(CUT_OFF, DECIDING[width]) == []


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_a_length(browser: Any, address: str, page: str) -> None:
    open_on_a_desktop(browser, f"{address}/{page}")
    height = browser.execute_script("return document.querySelector('article').getBoundingClientRect().height")
    assert height <= SCREENS * SCREEN or page in EVIDENCE


def test_the_first_two_screens(browser: Any, address: str) -> None:
    """The line of use, the chart, the table of times with its command, and what has run where."""
    open_on_a_desktop(browser, f"{address}/index.html")
    ends = browser.execute_script(
        "return [...document.querySelectorAll('article pre, article .picture, article table')].slice(0, 5)"
        ".map(part => [part.tagName, part.getBoundingClientRect().bottom])"
    )
    assert [tag for tag, _ in ends] == ["PRE", "DIV", "TABLE", "PRE", "TABLE"]
    assert max(bottom for _, bottom in ends) <= 2 * SCREEN


def open_on_a_desktop(browser: Any, url: str) -> None:
    metrics = {"width": WIDTHS["desktop"], "height": SCREEN, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.get(url)
