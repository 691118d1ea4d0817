"""The live page in a real browser, over a server with two ranks that works while it is looked at."""

import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.server.conftest import MODEL, Running, serving

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
PATIENCE_S = 40
TWO_RANKS = ("--tensor-parallel-size", "2", "--decode-context-parallel-size", "2")


@pytest.fixture(scope="module")
def two_ranks(model: Path) -> Iterator[Running]:
    with serving(model, *TWO_RANKS) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    binary = next(filter(None, map(shutil.which, BROWSERS)), None)
    driver = shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("The live page is looked at in Chromium: apt install chromium chromium-driver.")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chrome = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    chrome.set_page_load_timeout(PATIENCE_S)
    yield chrome
    chrome.quit()


@pytest.fixture
def work(two_ranks: Running) -> Iterator[None]:
    """Requests that run for as long as a test does."""
    over = threading.Event()

    def ask(number: int) -> None:
        body = {"prompt": f"{number} and a longer prompt " * 6, "max_tokens": 300, "ignore_eos": True}
        while not over.is_set():
            httpx.post(f"{two_ranks.url}/v1/completions", json=body, timeout=PATIENCE_S)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    yield
    over.set()
    for thread in threads:
        thread.join()


def until(browser: Any, script: str) -> Any:
    """Waits until a script returns something that is true."""
    return WebDriverWait(browser, PATIENCE_S, 0.1).until(lambda b: b.execute_script(script), script)


def show(browser: Any, *, width: int, height: int, scheme: str, mobile: bool = False) -> None:
    metrics = {"width": width, "height": height, "deviceScaleFactor": 2, "mobile": mobile}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def keep(browser: Any, name: str, tmp_path: Path) -> None:
    """Saves a screenshot where CI collects what tests leave, or among pytest's own files."""
    directory = Path(os.environ.get("KVSPAN_ARTIFACTS", tmp_path))
    directory.mkdir(parents=True, exist_ok=True)
    assert browser.save_screenshot(str(directory / f"live-{name}.png"))


COLOURS = """
const pixels = (canvas) => canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
return [...document.querySelectorAll('#ranks canvas')].map((canvas) => {
  const found = new Set();
  const data = pixels(canvas);
  for (let i = 0; i < data.length; i += 4) {
    if (data[i + 3] === 255) found.add(data.slice(i, i + 3).join());
  }
  return found.size;
});
"""

# Any cell of a request: where it is in its canvas.
CELL = """
const canvas = document.querySelector('#ranks canvas');
const columns = Number(canvas.dataset.columns);
const step = canvas.clientWidth / columns;
return [step / 2 - canvas.clientWidth / 2, step / 2 - canvas.clientHeight / 2];
"""


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("work")
def test_a_run_on_two_ranks_is_seen(two_ranks: Running, browser: Any, tmp_path: Path) -> None:
    show(browser, width=1280, height=1000, scheme="light")
    browser.get(f"{two_ranks.url}/")
    until(browser, "return Number(document.body.dataset.looks) > 3")
    assert browser.execute_script("return document.querySelector('#model').textContent") == MODEL
    assert "DCP 2" in browser.execute_script("return document.querySelector('#layout').textContent")
    names = "return [...document.querySelectorAll('.rank b')].map((node) => node.textContent)"
    assert browser.execute_script(names) == ["rank 0", "rank 1"]
    # A request's blocks lie on both ranks, and both show more colours than free and cached.
    until(browser, "return document.querySelector('#requests li .span')?.children.length === 2")
    assert min(browser.execute_script(COLOURS)) >= 3
    for card in ("output", "ttft", "tpot", "kv"):
        figure = f"document.querySelector('#card-{card} b').textContent"
        until(browser, f"return parseFloat({figure}) > 0")
        assert (
            browser.execute_script(f"return document.querySelectorAll('#card-{card} path').length") == 2
        )
    x, y = browser.execute_script(CELL)
    canvas = browser.find_element("css selector", "#ranks canvas")
    ActionChains(browser).move_to_element_with_offset(canvas, int(x), int(y)).perform()
    tip = until(
        browser, "const tip = document.querySelector('#tip'); return !tip.hidden && tip.textContent"
    )
    assert tip.startswith("rank 0, block")
    keep(browser, "light", tmp_path)
    assert browser.get_log("browser") == []


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("work")
def test_it_is_dark_at_night_and_fits_a_phone(two_ranks: Running, browser: Any, tmp_path: Path) -> None:
    show(browser, width=1280, height=1000, scheme="dark")
    browser.get(f"{two_ranks.url}/")
    until(browser, "return document.querySelector('#requests li')")
    ground = "return getComputedStyle(document.documentElement).backgroundColor"
    assert browser.execute_script(ground) == "rgb(16, 19, 23)"
    keep(browser, "dark", tmp_path)
    show(browser, width=360, height=1400, scheme="light", mobile=True)
    until(
        browser, "return innerWidth === 360 && document.querySelector('#ranks canvas').clientWidth < 360"
    )
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 360
    keep(browser, "phone", tmp_path)


@pytest.mark.timeout(120)
def test_the_chat_talks_to_the_server(two_ranks: Running, browser: Any) -> None:
    show(browser, width=1280, height=1000, scheme="light")
    browser.get(f"{two_ranks.url}/")
    until(browser, "return document.querySelector('#state').className === 'state ready'")
    browser.find_element("id", "chat-input").send_keys("<b>hi</b>")
    browser.find_element("id", "chat-send").click()
    until(browser, "return document.querySelector('.log small')")
    said = browser.execute_script(
        "return [...document.querySelectorAll('.log p')].map((p) => p.textContent)"
    )
    assert said[0] == "<b>hi</b>"
    assert len(said) == 2
    assert "out" in browser.execute_script("return document.querySelector('.log small').textContent")
    assert browser.execute_script("return document.querySelectorAll('.log b').length") == 0


def test_the_page_is_whole_and_careful(server: Running) -> None:
    with server.http as client:
        page = client.get("/")
        assert page.headers["content-security-policy"].startswith("default-src 'self'")
        for name in (
            "style.css",
            "main.js",
            "line.js",
            "ranks.js",
            "requests.js",
            "chat.js",
            "icon.svg",
        ):
            assert client.get(f"/live/{name}").status_code == 200, name
        assert client.get("/live/feed.py").status_code == 404
        assert client.get("/live/..%2Fapp.py").status_code == 404


def test_the_feed_tells_a_state_at_a_time(server: Running) -> None:
    with server.http as client, client.stream("GET", "/live/feed") as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        lines = (line for line in reply.iter_lines() if line)
        looks = [json.loads(next(lines).removeprefix("data: ")) for _ in range(3)]
    assert looks[0]["ready"]
    assert looks[0]["ranks"] == [{"replica": 0, "rank": 0, "pool": 0}]
    assert len(looks[0]["pools"][0]["cells"]) <= looks[0]["pools"][0]["num_blocks"]
    assert looks[2]["at"] - looks[0]["at"] > 0.2


def test_the_page_is_open_and_its_feed_is_not(model: Path) -> None:
    with serving(model, "--api-key", "secret") as locked, locked.http as client:
        assert client.get("/").status_code == 200
        assert client.get("/live/main.js").status_code == 200
        assert client.get("/live/feed").status_code == 401
        with client.stream("GET", "/live/feed", headers={"Authorization": "Bearer secret"}) as reply:
            assert reply.status_code == 200


def test_replicas_are_shown_side_by_side(model: Path) -> None:
    replicas = ("--data-parallel-size", "2", *TWO_RANKS)
    with serving(model, *replicas) as two, httpx.stream("GET", f"{two.url}/live/feed") as reply:
        seen = json.loads(next(filter(None, reply.iter_lines())).removeprefix("data: "))
    where = [(each["replica"], each["rank"], each["pool"]) for each in seen["ranks"]]
    assert where == [(0, 0, 0), (0, 1, 1), (1, 0, 2), (1, 1, 3)]
    assert [len(pool["cells"]) > 0 for pool in seen["pools"]] == [True] * 4
    assert seen["layout"]["num_replicas"] == 2


@pytest.mark.timeout(120)
def test_replicas_stand_side_by_side_and_a_lost_one_says_why(
    model: Path, browser: Any, tmp_path: Path
) -> None:
    with serving(model, "--data-parallel-size", "2", *TWO_RANKS) as two:
        show(browser, width=1280, height=1000, scheme="light")
        browser.get(f"{two.url}/")
        until(browser, "return Number(document.body.dataset.looks) > 2")
        tops = (
            "return [...document.querySelectorAll('.replica')].map((r) => r.getBoundingClientRect().top)"
        )
        first, second = browser.execute_script(tops)
        assert first == second
        names = """return [...document.querySelectorAll('.replica')].map(
            (r) => [...r.querySelectorAll('h3, .rank b')].map((node) => node.textContent.trim()))"""
        assert browser.execute_script(names) == [
            ["replica 0", "rank 0", "rank 1"],
            ["replica 1", "rank 0", "rank 1"],
        ]
        assert min(browser.execute_script(COLOURS)) >= 1
        keep(browser, "replicas", tmp_path)
        psutil.Process(two.process.pid).children()[1].kill()
        until(browser, "return document.querySelectorAll('.replica.lost').length === 1")
        said = "return document.querySelector('.replica.lost h3 span').textContent"
        assert browser.execute_script(said)
        until(browser, "return document.querySelectorAll('.replica.lost').length === 0")
