"""The interactive page: its content, and its behaviour in a browser."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.models import TransformerLayer
from tvmbridge import capture, cli, to_relax, visualize_html
from tvmbridge.core.errors import BridgeError
from tvmbridge.inspect import page
from tvmbridge.inspect.stages import Stages
from tvmbridge.inspect.timing import seconds_alone
from tvmbridge.inspect.visualize import picture_of

needs_package = pytest.mark.skipif(
    page.missing_package() is not None, reason="easydot is not installed"
)
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
needs_browser = pytest.mark.skipif(
    importlib.util.find_spec("selenium") is None or None in (BROWSER, DRIVER),
    reason="there is no selenium, no Chromium or no chromedriver",
)


class Blocks(nn.Module):
    """A module with many encoder layers, so that the page starts with folded groups."""

    def __init__(self, count: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TransformerLayer() for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture(scope="module")
def mod() -> Any:
    return to_relax(capture(Blocks().eval(), torch.ones(2, 5, 8)))


def data_of(html: str) -> Any:
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    assert match
    return json.loads(match[1])


@needs_package
def test_the_page_has_all_that_the_picture_has(mod: Any) -> None:
    drawn, data = picture_of(mod), data_of(visualize_html(mod))
    assert [n["name"] for n in data["nodes"]] == [n.name for n in drawn.nodes]
    assert len(data["edges"]) == len(drawn.edges)
    assert set(data["folded"]) == drawn.readable() == drawn.at_depth(1)
    assert all(set(node["groups"]) <= set(data["groups"]) for node in data["nodes"])


@needs_package
def test_no_text_ends_a_script(mod: Any) -> None:
    html = visualize_html(mod, title="</script><b>&amp;@DATA@")
    assert html.count("</script>") == 3
    assert data_of(html)["nodes"]
    assert "http://" not in html.split('id="graphviz"')[0]  # the page loads nothing by network


class _Named(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.add_module(name, nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return next(self.children())(x)


class _Scripts(HTMLParser):
    """A parser that collects the text of each script, as a browser would without ``<!--``."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def handle_data(self, data: str) -> None:
        if self.cdata_elem == "script":
            self.texts[-1] += data

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag == "script":
            self.texts.append("")


@needs_package
@pytest.mark.parametrize("name", ["<!--<script>", "<!--", "</script>", "<ScRiPt", "-->", "]]>"])
def test_a_name_leaves_the_scripts_of_a_page_whole(name: str) -> None:
    """Check names with ``<!--<script``, after which a browser needs two end tags of the script."""
    html = visualize_html(to_relax(capture(_Named(name), torch.ones(2, 4))), title=name)
    found = _Scripts()
    found.feed(html)
    assert len(found.texts) == 3
    data, engine, _ = found.texts
    assert "<" not in data + engine
    assert any(name in str(group["path"]) for group in json.loads(data)["groups"].values())


def test_without_the_package_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(page, "_PACKAGE", "no_such_package")
    mod = to_relax(capture(nn.Linear(2, 2), torch.ones(1, 2)))
    with pytest.raises(BridgeError, match=r"tvmbridge\[draw\]"):
        visualize_html(mod)
    out = tmp_path / "page.html"
    words = ["visualize", "tests.inspect.compare.models:block_and_input", "--out", str(out)]
    assert cli.main(words) == 1
    assert "tvmbridge[draw]" in capsys.readouterr().err
    assert not out.exists()


class Browser:
    """A page in Chromium, operated like a person would."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, path: Path) -> None:
        self.driver.get(path.as_uri())
        self.until(lambda: self.nodes() is not None)

    def until(self, holds: Callable[[], bool]) -> None:
        from selenium.webdriver.support.wait import WebDriverWait

        WebDriverWait(self.driver, 60).until(lambda _: holds())

    def nodes(self) -> int | None:
        """Return the number of visible nodes; None before the first layout."""
        count = self.driver.execute_script("return document.body.dataset.nodes")
        drawn = len(self.driver.find_elements("css selector", "g.node"))
        return drawn if count is not None and int(count) == drawn else None

    def part(self, name: str) -> Any:
        return self.driver.find_element("css selector", f'[data-name="{name}"]')

    def text(self, id_: str) -> str:
        return str(self.driver.find_element("id", id_).text)

    def double_click(self, name: str) -> None:
        from selenium.webdriver import ActionChains

        text = self.part(name).find_element("css selector", "polygon, path, ellipse")
        ActionChains(self.driver).double_click(text).perform()

    def click(self, name: str) -> None:
        shape = self.part(name).find_element("css selector", "polygon, path, ellipse")
        shape.click()

    def view(self) -> list[float]:
        box = self.driver.execute_script(
            "return document.querySelector('svg').getAttribute('viewBox')"
        )
        return [float(number) for number in box.split(" ")]

    def complaints(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser")]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1500,950"):
        options.add_argument(argument)
    options.binary_location = BROWSER
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield Browser(driver)
    driver.quit()


@needs_package
@needs_browser
def test_a_page_folds_and_unfolds(mod: Any, browser: Browser, tmp_path: Path) -> None:
    drawn, out = picture_of(mod), tmp_path / "page.html"
    out.write_text(visualize_html(mod, title="blocks"), encoding="utf-8")
    browser.open(out)
    assert browser.driver.title == "blocks"
    folded = drawn.readable()
    assert browser.nodes() == len(drawn.folded(folded).nodes)
    (first,) = [g.name for g in drawn.groups.values() if g.path == "blocks.0"]
    browser.double_click(first)
    rest = folded - {first}
    browser.until(lambda: browser.nodes() == len(drawn.folded(rest).nodes))
    assert "TransformerLayer" in browser.text("facts")
    browser.driver.find_element("css selector", "#facts button").click()
    browser.until(lambda: browser.nodes() == len(drawn.folded(folded).nodes))
    depth = browser.driver.find_element("id", "depth")
    depth.send_keys("never")
    browser.until(lambda: browser.nodes() == len(drawn.nodes))
    assert browser.complaints() == []


@needs_package
@needs_browser
def test_a_page_searches_and_says_what_is_known(browser: Browser, tmp_path: Path) -> None:
    shown = Stages(TransformerLayer().train(), torch.ones(2, 5, 8)).draw("joint")
    seconds = seconds_alone(shown.graph)
    drawn = picture_of(shown.graph, coloring=shown.coloring, seconds=seconds)
    out = tmp_path / "page.html"
    out.write_text(page.page(drawn, "joint", ()), encoding="utf-8")
    browser.open(out)
    search = browser.driver.find_element("id", "search")
    search.send_keys("nn.softmax")
    assert browser.text("found") == "1 found"
    search.send_keys("\n")
    browser.until(lambda: "nn.softmax" in browser.text("facts"))
    facts = browser.text("facts")
    assert "(2, 2, 5, 5) float32" in facts
    assert "400 B" in facts
    assert "models.py:" in facts
    assert "time alone" in facts
    assert "kept for backward" in browser.text("legend")
    assert len(browser.driver.find_elements("css selector", "#slow tr")) == 10
    softmax = next(n.name for n in drawn.nodes if n.facts.get("operator") == "nn.softmax")
    readers = {e.target for e in drawn.edges if e.source == softmax}
    near = browser.driver.find_elements("css selector", "g.edge.near")
    assert len(near) == len(readers) + sum(e.target == softmax for e in drawn.edges)
    reader = next(n for n in drawn.nodes if n.name in readers)
    browser.click(reader.name)
    browser.until(lambda: f"variable {reader.facts['variable']}" in browser.text("facts"))
    assert browser.complaints() == []


@needs_package
@needs_browser
def test_a_page_pans_and_zooms(browser: Browser, mod: Any, tmp_path: Path) -> None:
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.actions.wheel_input import ScrollOrigin

    out = tmp_path / "page.html"
    out.write_text(visualize_html(mod), encoding="utf-8")
    browser.open(out)
    picture = browser.driver.find_element("id", "picture")
    before = browser.view()
    ActionChains(browser.driver).drag_and_drop_by_offset(picture, 100, 40).perform()
    moved = browser.view()
    assert moved[0] < before[0]
    assert moved[1] < before[1]
    assert moved[2:] == before[2:]
    origin = ScrollOrigin.from_element(picture)
    ActionChains(browser.driver).scroll_from_origin(origin, 0, -200).perform()
    browser.until(lambda: browser.view()[2] < moved[2])
    browser.driver.find_element("id", "fit").click()
    whole = browser.view()
    browser.driver.find_element("id", "more").click()
    assert browser.view()[2] == pytest.approx(whole[2] / 1.3)


def test_the_package_is_not_imported_for_a_page() -> None:
    page.missing_package()
    assert "easydot" not in sys.modules
