"""The page in a real browser: every page, keys, colours, narrow screens, hostile texts, and runs
that go on.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from urllib.parse import quote, urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from agentrl import EncodedImage
from agentrl.cluster.worker_registry import WorkerCount
from agentrl.flow import PendingWait
from agentrl.observe.ending import Ending
from agentrl.observe.live_status import LiveState, write_live_state
from agentrl.observe.machine import MachineState
from agentrl.rollout.accounts import OpenGroup, SchedulerStatus
from agentrl.testing.made_up_run import BEGIN, MadeUpRun
from agentrl.viewer.report import write_report
from agentrl.viewer.server import PageServer
from tests.processes import PATIENCE_SECONDS

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning:selenium")]

HOSTILE = (
    "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">",
    (
        "</pre></script><svg onload=\"document.title='owned'\"><a"
        " href=\"javascript:document.title='owned'\">x</a>"
    ),
    (
        "{{constructor.constructor('return 1')()}} ${document.title='owned'} \u202eright to left"
        " \ud7ff \x00 \x1b[31m"
    ),
    (
        "<iframe"
        " srcdoc=\"<script>parent.document.title='owned'</script>\"></iframe>"
        "<style>*{display:none}</style>"
    ),
    "<form action=https://evil.example><input autofocus onfocus=\"document.title='owned'\"></form>",
)

DRAWN = '<p id="drawn" style="color: rgb(1, 2, 3)">a board</p>'
HOSTILE_PICTURES = (
    *HOSTILE,
    "<script>parent.document.title='owned'; top.location='https://evil.example/'</script>",
    '<meta http-equiv="refresh" content="0; url=https://evil.example/refresh">',
    (
        '<img src="https://evil.example/image"><link rel="stylesheet"'
        ' href="https://evil.example/style">'
    ),
    (
        '<style>@import "https://evil.example/import"; p { background:'
        " url(https://evil.example/back) }</style>"
    ),
    (
        '<iframe src="https://evil.example/frame"></iframe><object'
        ' data="https://evil.example/object"></object>'
    ),
    (
        '<form action="https://evil.example/form" id="f"></form><button form="f"'
        " autofocus>send</button>"
    ),
    '<base href="https://evil.example/"><a href="link" id="link" target="_top">open</a>',
    "\"></iframe><script>document.title='owned'</script>",
)
PICTURES = [*(one + DRAWN for one in HOSTILE_PICTURES), DRAWN]


class Page:
    """The page over some runs, in a browser."""

    def __init__(self, browser, url: str) -> None:
        self.browser = browser
        self.url = url

    def open(self, path: str) -> None:
        """Go to an address of the page, and wait until it is drawn."""
        self.browser.get("about:blank")
        self.browser.get(f"{self.url}/{path}")
        self.wait(
            lambda: self.script(
                "return document.querySelector('#view > div')?.childElementCount > 0"
            )
        )
        assert self.script("return document.querySelector('.error')?.textContent ?? null") is None

    def script(self, text: str, *arguments):
        return self.browser.execute_script(text, *arguments)

    def texts(self, selector: str) -> list[str]:
        return self.script(
            "return [...document.querySelectorAll(arguments[0])].map((one) => one.textContent)",
            selector,
        )

    def press(self, keys: str) -> None:
        """Press keys, wherever the focus is on the page."""
        from selenium.webdriver.common.by import By

        self.browser.find_element(By.TAG_NAME, "body").send_keys(keys)

    def wait(self, holds: Callable[[], object]) -> None:
        limit = time.monotonic() + PATIENCE_SECONDS
        while not holds():
            assert time.monotonic() < limit, self.script("return document.body.innerText")
            time.sleep(0.05)

    def requested(self) -> set[str]:
        """The hosts that the browser has asked for anything since the last call."""
        events = [
            json.loads(entry["message"])["message"] for entry in self.browser.get_log("performance")
        ]
        urls = [
            one["params"]["request"]["url"]
            for one in events
            if one["method"] == "Network.requestWillBeSent"
        ]
        return {
            urlsplit(url).netloc
            for url in urls
            if urlsplit(url).scheme not in ("data", "about", "chrome")
        }

    def complaints(self) -> list[str]:
        """Errors and warnings in the browser's console since the last call."""
        return [
            entry["message"]
            for entry in self.browser.get_log("browser")
            if entry["level"] != "INFO"
        ]


@pytest.fixture
def runs(tmp_path):
    """Two runs with different settings, in a folder."""
    for name, lr in (("first", 1e-3), ("second", 2e-3)):
        run = MadeUpRun(tmp_path / name, settings={"trainer": {"name": "local", "lr": lr}})
        run.begin()
        for _ in range(3):
            run.step()
    return tmp_path


@pytest.fixture
def serve(browser) -> Iterator[Callable[..., Page]]:
    """Serves folders, and opens the page over them."""
    started: list[tuple[PageServer, threading.Thread]] = []

    def start(*places, token: str | None = None) -> Page:
        listening = threading.Event()
        server = PageServer(places, token=token, on_start=lambda url: listening.set())
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        started.append((server, thread))
        assert listening.wait(PATIENCE_SECONDS)
        page = Page(browser, server.url)
        page.requested()
        page.complaints()
        return page

    yield start
    browser.get("about:blank")
    for server, thread in started:
        server.should_exit = True
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()


def test_every_page_is_drawn_without_an_error_or_a_request_to_another_host(serve, runs):
    page = serve(runs)
    page.open("#/run?runs=first,second")
    page.wait(
        lambda: page.script("return document.querySelectorAll('.chart svg path').length > 10")
    )
    assert {"reward", "success", "entropy"} <= set(page.texts(".chart h3"))
    assert page.texts(".status h3 span") == ["killed in step 2, record"] * 2
    page.open("#/episodes?runs=first")
    assert page.texts("#total") == ["1 to 51 of 51"]
    assert len(page.texts("tbody tr")) == 51
    page.open("#/episodes?runs=first&group=train-000001")
    assert len(page.texts(".columns section")) == 4
    page.open("#/episode?runs=first&id=train-000001%2F0%2F0")
    assert "was trained at step 0 as samples" in page.texts(".fate")[0]
    assert len(page.texts(".token")) == 18
    page.open("#/time?runs=first")
    assert {"trainer", "engine", "environments", "waits for episodes"} <= set(
        page.texts(".lane-name")
    )
    page.wait(lambda: page.script("return document.querySelector('canvas.gantt') !== null"))
    assert {"rewards", "channel groups"} <= set(
        page.texts("[aria-label='stages and channels'] .lane-name")
    )
    assert page.texts(".badge") == ["bound by: engine"]
    page.script(
        "[...document.querySelectorAll('button')].find((b) => b.textContent === 'colour by"
        " staleness').click()"
    )
    assert "versions of the weights" in page.script(
        "return document.querySelector('#view').innerText"
    )
    page.open("#/config?runs=first,second")
    assert page.texts("tbody td:first-child") == ["trainer.lr"]
    assert page.complaints() == []
    assert page.requested() == {urlsplit(page.url).netloc}


def test_a_group_with_branches_is_drawn_as_trees_and_a_turn_gives_the_command(serve, tmp_path):
    run = MadeUpRun(tmp_path / "run", groups=1, members=3, branches=True)
    run.begin()
    run.step()
    page = serve(run.folder)
    page.open("#/episodes?group=train-000000")
    name = "train-000000/1/0"
    assert any(text.endswith(f"{name}, from turn 1") for text in page.texts(".trees text"))
    page.open(f"#/episode?id={quote(name, safe='')}")
    assert "It has left train-000000/0/0 at turn 1" in "".join(page.texts("p.small"))
    page.script("document.querySelectorAll('.message header button')[2].click()")
    command = f"agentrl replay {run.folder} {name} --turn 2"
    assert page.texts(".command:not([hidden])") == [command]


def test_the_colour_of_a_token_says_what_its_tip_says_exactly(serve, runs):
    page = serve(runs)
    page.open("#/episodes?runs=first&fate=trained&step=0")
    names = [name for name in page.texts("tbody td:first-child") if "/1/0" in name]
    for name in names:  # the numbers of one group were kept
        page.open(f"#/episode?runs=first&id={quote(name, safe='')}")
        if not page.script("return document.body.innerText.includes('were not kept')"):
            break
    facts = page.script("return document.querySelector('.token').about")
    assert facts["old"] == pytest.approx(facts["engine"] + 0.01, abs=1e-6)
    page.script(
        "const token = document.querySelector('.token');token.dispatchEvent(new"
        " PointerEvent('pointerover', {bubbles: true, clientX: 50, clientY: 50}))"
    )
    rows = dict(
        page.script(
            "return [...document.querySelectorAll('#tip div')]"
            ".map((row) => [...row.children].map((c) => c.textContent))"
        )
    )
    assert float(rows["logprob (engine)"]) == pytest.approx(facts["engine"], rel=1e-4)
    assert float(rows["advantage"]) == pytest.approx(facts["advantage"], rel=1e-4)
    colours = set()
    for by in ("advantage", "engine", "version", "mask", "ratio", "none"):
        page.script(
            "const select = document.querySelector('select[aria-label^=colour]'); select.value ="
            " arguments[0];select.dispatchEvent(new Event('change'))",
            by,
        )
        colours.add(page.script("return document.querySelector('.token').style.background"))
    assert "" in colours
    assert len(colours) >= 4


@pytest.mark.long
def test_keys_lead_through_the_pages(serve, runs):
    page = serve(runs)
    page.open("#/run?runs=first")
    page.press("2")
    page.wait(lambda: len(page.texts("tbody tr")) == 51)
    page.press("jjk")
    assert (
        page.script(
            "return [...document.querySelectorAll('tbody tr')].findIndex((r) => r.ariaSelected)"
        )
        == 0
    )
    first = page.texts("tbody td:first-child a")[0]
    page.press("\ue007")  # Enter
    page.wait(lambda: page.texts("h1") and first in page.texts("h1")[0])
    page.press("u")
    page.wait(lambda: len(page.texts("tbody tr")) == 51)
    page.press("/")
    assert page.script("return document.activeElement.type") == "search"
    page.open("#/time?runs=first")
    page.press("6")
    page.wait(lambda: "trainer.lr" in page.texts("tbody td:first-child"))
    page.press("?")
    assert page.script("return document.querySelector('dialog').open") is True


@pytest.mark.long
def test_it_is_readable_in_light_and_dark_and_fits_a_narrow_screen(serve, runs):
    page = serve(runs)
    page.open("#/run?runs=first")

    def contrast() -> float:
        """WCAG's contrast of the text and its background."""
        return page.script("""
            const light = (name) => {
              const [r, g, b] = getComputedStyle(document.body)[name].match(/\\d+/g)
                .map((c) => c / 255)
                .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
              return 0.2126 * r + 0.7152 * g + 0.0722 * b;
            };
            const [a, b] = [light("color"), light("backgroundColor")].sort().reverse();
            return (a + 0.05) / (b + 0.05);""")

    backgrounds = []
    for _ in range(2):
        assert contrast() > 7
        backgrounds.append(page.script("return getComputedStyle(document.body).backgroundColor"))
        page.press("t")
    assert len(set(backgrounds)) == 2
    try:
        page.browser.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": True},
        )
        for path in ("run", "episodes", "episode", "heldout", "tools", "time", "config"):
            page.open(f"#/{path}?runs=first&id=train-000001%2F0%2F0")
            width = page.script("return document.documentElement.scrollWidth")
            assert width <= 390, f"{path} is {width} wide"
            out_of_sight = page.script("""
                const wide = [".lanes", ".settings"]
                  .map((name) => document.querySelector(name)).filter(Boolean);
                return wide.map((one) => one.scrollWidth - one.clientWidth);""")
            assert all(pixels <= 0 for pixels in out_of_sight), f"a part of {path} is out of sight"
    finally:
        page.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_no_text_of_a_run_runs(serve, tmp_path):
    name = "<img src=x onerror=document.title='owned'>"
    run = MadeUpRun(
        tmp_path / name,
        texts=HOSTILE,
        env=HOSTILE[0],
        tools=HOSTILE,
        settings={
            HOSTILE[1]: HOSTILE[2],
            "model": {"name": HOSTILE[3]},
            "observe": {"notes": HOSTILE[4], "tags": HOSTILE},
        },
    )
    run.begin()
    run.step()
    run.evaluate((1.0, None))
    alarm = {"step": 0, "text": HOSTILE[0], "metrics": ["entropy", HOSTILE[1]]}
    (run.folder / "warnings.jsonl").write_text(json.dumps(alarm) + "\n")
    (run.folder / "launches.jsonl").write_text(
        json.dumps({"at": HOSTILE[0], "host": HOSTILE[1], "commit": HOSTILE[3]})
    )
    played = SchedulerStatus(
        1, 2, 3, 4, {"environment": 5}, [OpenGroup(HOSTILE[3], HOSTILE[0], 60.0)]
    )
    doing(
        run,
        HOSTILE[1],
        LiveState(os.getpid(), 1.0, (WorkerCount(HOSTILE[4], 1, 2),), (), HOSTILE, played),
    )
    page = serve(tmp_path)
    runs = quote(quote(name))
    pages = (
        "run",
        "episodes",
        "episodes&group",
        "episode",
        "episode failed",
        "heldout",
        "tools",
        "time",
        "config",
    )
    for path in pages:
        kind, _, what = path.replace("&", " ").partition(" ")
        more = {"group": "&group=train-000001", "failed": "&id=train-000004%2F0%2F0"}.get(what, "")
        page.open(f"#/{kind}?runs={runs}{more or '&id=train-000001%2F0%2F0'}")
        assert page.script("return document.title") == f"{name} · agentrl"
        assert (
            page.script(
                "return document.querySelectorAll('#view img, #view iframe, #view script,"
                " form').length"
            )
            == 0
        )
    assert page.requested() == {urlsplit(page.url).netloc}
    assert page.complaints() == []
    page.open(f"#/run?runs={runs}")
    assert page.texts(".outside") == list(HOSTILE)
    assert page.texts(".crew") == [f"{HOSTILE[4]} 1 of 2"]
    page.open(f"#/episode?runs={runs}&id=train-000001%2F0%2F0")
    assert HOSTILE[0] in page.texts(".words")


def look_into_frames(page: Page, count: int) -> None:
    """Each frame shows what its environment drew, and what else is in it gets nowhere, also when it
    is clicked.
    """
    frames = page.browser.find_elements("css selector", "iframe")
    assert len(frames) == count
    for frame in frames:
        page.script("arguments[0].scrollIntoView()", frame)
        page.browser.switch_to.frame(frame)
        try:
            page.wait(lambda: page.script("return document.querySelector('#drawn') !== null"))
            colour = page.script("return getComputedStyle(document.querySelector('#drawn')).color")
            assert colour == "rgb(1, 2, 3)"
            assert page.script("return self.origin") == "null"
            for link in page.browser.find_elements("css selector", "#link, button"):
                page.script("arguments[0].click()", link)
        finally:
            page.browser.switch_to.default_content()


def test_an_environments_picture_is_drawn_and_can_do_nothing_else(serve, tmp_path):
    """In frames without scripts: what they hold cannot ask for anything, open anything, or reach
    the page.
    """
    run = MadeUpRun(tmp_path / "run", turns=len(HOSTILE_PICTURES) + 1, pictures=PICTURES)
    run.begin()
    run.step()
    page = serve(tmp_path)
    page.open("#/episode?runs=run&id=train-000001%2F0%2F0")
    look_into_frames(page, len(PICTURES) + 1)
    assert page.script("return document.title") == "run · agentrl"
    assert page.script("return location.href").startswith(page.url)
    assert page.requested() == {urlsplit(page.url).netloc}


def test_pictures_stand_where_they_stood_with_their_tokens(serve, tmp_path):
    """Beside the messages that showed them, and among the tokens of the prompts. One whose file
    holds something else is no picture there, and does nothing.
    """
    images = [EncodedImage.of_pixels(np.full((4, 6, 3), shade, np.uint8)) for shade in (0, 90, 180)]
    run = MadeUpRun(tmp_path / "run", turns=3, images=images)
    run.begin()
    run.step()
    file = tmp_path / "run" / "images" / images[2].name
    file.write_bytes(b"<svg xmlns='http://www.w3.org/2000/svg' onload='document.title=1'/>")
    page = serve(tmp_path)
    page.open("#/episode?runs=run&id=train-000001%2F0%2F0")
    page.wait(lambda: len(page.texts("figure.shown-image figcaption")) == 3)
    assert page.texts("figure.shown-image figcaption") == ["2 tokens"] * 3
    named = "return [...document.querySelectorAll('img.seen')].map((one) => one.title)"
    assert page.script(named) == [image.name for image in images[:2]]
    sizes = "return [...document.querySelectorAll('img.seen')].map((one) => one.naturalWidth)"
    page.wait(lambda: page.script(sizes) == [6, 6])
    (lost,) = page.texts("figure.shown-image p")
    assert lost == f"the picture {images[2].name} is missing or damaged"
    (button,) = page.browser.find_elements("xpath", "//button[.='whole prompts as tokens']")
    button.click()
    parts = (
        "const count = (child) => child.tagName + child.querySelectorAll('.token').length;"
        "return [...document.querySelectorAll('article.message')]"
        ".map((one) => [...one.children].slice(0, 5).map(count))"
    )
    page.wait(lambda: page.script(parts) == [["HEADER0", "DIV1", "FIGURE0", "DIV1", "DIV6"]] * 3)
    assert page.script("return document.title") == "run · agentrl"
    assert page.requested() == {urlsplit(page.url).netloc}


def test_a_new_step_of_a_live_run_is_on_the_page_without_reloading(serve, runs):
    page = serve(runs)
    page.open("#/run?runs=second")
    page.script("window.marked = true")
    assert "3 of 100" in page.texts(".status b")
    run = MadeUpRun(runs / "second")
    run._done, run._tasks = 3, 15
    run.step()
    page.wait(lambda: "4 of 100" in page.texts(".status b"))
    MadeUpRun(runs / "third").begin()
    page.wait(lambda: "third" in page.texts(".chip"))
    assert page.script("return window.marked") is True


def doing(run: MadeUpRun, phase: str, state: LiveState | None) -> None:
    """Let a run be in this phase, in the process of this test."""
    status = {"pid": os.getpid(), "step": 3, "phase": phase, "since": "2026-01-01T00:00:00+00:00"}
    (run.folder / "status.json").write_text(json.dumps(status))
    if state is not None:
        write_live_state(run.folder / "live.json", state)


def test_what_a_live_run_waits_for_and_who_is_alive_change_on_the_page_without_reloading(
    serve, runs
):
    page, run = serve(runs), MadeUpRun(runs / "second")
    page.open("#/run?runs=second")
    assert page.texts(".now") == []
    workers = (
        WorkerCount("engine", 2, 2),
        WorkerCount("env", 7, 8, 3),
        WorkerCount("trainer", 4, 4),
    )
    waits = (
        PendingWait("environment", "step", 30, 12.5),
        PendingWait("environment", "reset", 10, 2.0),
        PendingWait("engine", "generate", 1, 0.2),
        PendingWait("engine", "update_weights", 1, 0.2),
    )
    played = SchedulerStatus(
        256, 256, 12, 64, {"reward": 2}, [OpenGroup("train-000007", "lake", 75.0)], 1
    )
    doing(
        run,
        "rollout",
        LiveState(os.getpid(), 1.0, workers, waits, ("all servers are full",), played),
    )

    def rows() -> dict[str, str]:
        return dict(
            page.script(
                "return [...document.querySelectorAll('.now dt')]"
                ".map((t) => [t.textContent, t.nextSibling.textContent])"
            )
        )

    page.wait(lambda: "workers" in rows())
    page.script("window.marked = document.querySelector('.chip')")
    assert rows() == {
        "now": "The trainer waits for episodes: 12 of 64 groups are ready.",
        "waiting": "40 calls wait for environments (up to 12 s), 1 for the engine",
        "episodes": "256 of 256 slots taken; 1 episode waits for one",
        "workers": "engine 2 of 2environments 7 of 8, 3 restartstrainer 4 of 4",
        "longest": "train-000007 (lake) for 75 s",
        "failures": "reward 2",
        "outside": "all servers are full",
    }
    assert page.texts(".crew.fewer") == ["environments 7 of 8, 3 restarts"]
    doing(
        run,
        "train",
        LiveState(
            os.getpid(),
            2.0,
            (WorkerCount("trainer", 4, 4),),
            (),
            (),
            SchedulerStatus(0, 256, 0, 64),
        ),
    )
    page.wait(lambda: rows()["now"] == "The trainer works; episodes wait for its new weights.")
    assert page.texts(".crew") == ["trainer 4 of 4"]
    assert "waiting" not in rows()
    assert page.script("return window.marked.isConnected")  # whoever clicks it meanwhile clicks it
    (run.folder / "live.json").unlink()
    (run.folder / "summary.json").write_text('{"steps": 3}')
    page.wait(lambda: page.texts(".now") == [])
    page.open("#/run?runs=first")
    assert page.texts(".now") == []
    assert page.complaints() == []


@pytest.mark.long
def test_two_runs_are_compared_by_paired_differences(serve, runs):
    page = serve(runs)
    page.open("#/run?runs=first,second")
    page.script(
        "[...document.querySelectorAll('button')].find((b) =>"
        " b.textContent.startsWith('difference')).click()"
    )

    def values() -> dict[str, str]:
        return dict(zip(page.texts(".chart h3"), page.texts(".chart .values"), strict=True))

    page.wait(lambda: values()["entropy"] == "mean 0 ± 0")
    assert values()["reward"].startswith("mean ")


def test_the_page_sends_the_token_of_its_address(serve, runs):
    page = serve(runs / "first", token="a secret")
    page.open("#token=a%20secret")
    assert page.texts(".status h3 span") == ["killed in step 2, record"]
    assert "secret" not in page.script("return location.href")


@pytest.mark.long
def test_many_runs_fit_a_row_and_have_colours_of_their_own(serve, tmp_path):
    for number in range(20):
        run = MadeUpRun(tmp_path / f"run {number:02} of a long series, with commas & 50 %")
        run.begin()
        run.step()
    page = serve(tmp_path)
    names = [f"run {number:02} of a long series, with commas & 50 %" for number in range(20)]
    chosen = [names[0], *names[8:16]]  # the first and the ninth would have the same colour
    page.open(f"#/run?runs={quote(','.join(map(quote, chosen)))}")
    assert len(page.texts(".status")) == 9
    page.wait(lambda: page.texts(".chart .values span"))
    lines = page.script(
        """
        return [...document.querySelector(".chart svg g").querySelectorAll("path")]
          .map((line) => [line.getAttribute("stroke"), line.getAttribute("stroke-dasharray")])
          .map((pair) => pair.join(" "));"""
    )
    assert len(set(lines)) == 9
    assert page.script("return document.documentElement.scrollWidth <= innerWidth")
    page.script(
        "[...document.querySelectorAll('.chip')].find((one) => one.textContent === 'all 20 runs"
        " …').click()"
    )
    page.script("""
        const search = document.querySelector("#choose input[type=search]");
        search.value = "run 19";
        search.dispatchEvent(new Event("input"));""")
    page.script(
        "for (const box of document.querySelectorAll('#choose [type=checkbox]')) box.click()"
    )
    page.script(
        "[...document.querySelectorAll('#choose button')].find((b) => b.textContent === 'show"
        " these').click()"
    )
    page.wait(lambda: len(page.texts(".status")) == 10)
    page.open("#/run?runs=100%,%ZZ")  # an address that was written by hand
    assert page.texts(".status .name") == [names[-1]]
    assert page.complaints() == []


@pytest.mark.long
def test_a_run_that_is_deleted_leaves_the_page_without_reloading(serve, runs):
    page = serve(runs)
    page.open("#/run?runs=second")
    (runs / "second").rename(runs.parent / "elsewhere")
    page.wait(lambda: page.texts(".chip") == ["first"])
    page.wait(lambda: page.texts(".status .name") == ["first"])
    (runs / "first").rename(runs.parent / "there")
    page.wait(
        lambda: (
            "No run is in these folders"
            in page.script("return document.querySelector('#view').innerText")
        )
    )
    MadeUpRun(runs / "third").begin()
    page.wait(lambda: page.texts(".status .name") == ["third"])
    assert "nothing recorded" in page.texts(".status h3")[0]
    page.press("2")
    page.wait(
        lambda: (
            "This run has no episodes"
            in page.script("return document.querySelector('#view').innerText")
        )
    )
    for key, said in (
        ("3", "No episode of an evaluation"),
        ("4", "No tool was called"),
        ("5", "No step of this run"),
    ):
        page.press(key)
        page.wait(
            lambda said=said: (
                said in page.script("return document.querySelector('#view').innerText")
            )
        )
    assert page.complaints() == []


@pytest.mark.long
def test_what_judges_said_stands_beside_the_parts_and_characters_that_are_not_seen_are_named(
    serve, tmp_path
):
    run = MadeUpRun(tmp_path / "run", texts=("zero\u200bwidth \u202eevil \x1b[31m",))
    run.begin()
    run.step()
    path = run.folder / "trajectories" / "step_000000.parquet"
    table = pq.read_table(path)
    said = ['{"taste": "It is brief, and <b>right</b>."}'] * table.num_rows
    where = table.schema.get_field_index("words")
    pq.write_table(table.set_column(where, "words", pa.array(said)), path)
    page = serve(tmp_path)
    page.open("#/episode?runs=run&id=train-000001%2F1%2F0")
    assert page.texts(".rewards tbody td:first-child") == ["environment", "taste"]
    assert "It is brief, and <b>right</b>." in page.texts(".said")
    assert "zero⟨U+200B⟩width ⟨U+202E⟩evil ⟨U+001B⟩[31m" in page.texts(".words")


@pytest.mark.long
def test_long_answers_and_texts_unfold_when_they_are_asked_for(serve, tmp_path):
    run = MadeUpRun(
        tmp_path / "run", groups=1, members=2, turns=2, tokens=4000, texts=("word " * 100_000,)
    )
    run.begin()
    run.step()
    page = serve(tmp_path)
    page.open("#/episode?runs=run&id=train-000000%2F1%2F0")
    assert len(page.texts(".token")) == 2 * 1500
    assert len(page.texts(".message:not(.assistant) .words")[1]) == 20_000
    for text in ("more tokens", "more characters"):
        page.script(
            "[...document.querySelectorAll('button')].find((b) =>"
            " b.textContent.includes(arguments[0])).click()",
            text,
        )
    assert len(page.texts(".token")) == 4000 + 1500
    assert len(page.texts(".message:not(.assistant) .words")[1]) == 500_000


@pytest.mark.long
def test_a_chart_that_has_the_focus_is_read_by_the_arrow_keys(serve, runs):
    from selenium.webdriver.common.keys import Keys

    page = serve(runs)
    page.open("#/run?runs=first")
    page.wait(lambda: page.texts(".chart svg"))
    svg = page.browser.find_element("css selector", "[data-metric=entropy] svg")
    assert "entropy by step: first 0.3333" in svg.get_attribute("aria-label")
    page.script("arguments[0].focus()", svg)
    svg.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert page.texts("#tip b") == ["step 1"]
    assert "0.5" in page.texts("#tip div span:last-child")
    svg.send_keys(Keys.ESCAPE)
    assert page.script("return document.querySelector('#tip').hidden") is True


@pytest.fixture
def watched(tmp_path):
    """A run with tools, evaluations, warnings, samples of its machine, and a reason to end."""
    run = MadeUpRun(
        tmp_path / "a" / "watched",
        tools=("search", "submit"),
        settings={"observe": {"notes": "Longer budget.", "tags": ["baseline"]}},
    )
    run.begin()
    for scores in ((0.0, 1.0), (1.0, 0.0), (1.0, 0.0)):
        run.evaluate(scores)
        run.step()
    warning = {
        "step": 1,
        "text": "in step 2: the norm of the gradient is large <b>",
        "metrics": ["entropy"],
    }
    old = {"step": 2, "text": "in step 3: of an earlier release"}
    (run.folder / "warnings.jsonl").write_text(
        "".join(json.dumps(one) + "\n" for one in (warning, old))
    )
    launch = {
        "at": "2027-01-15T08:00:00+00:00",
        "host": "node-17",
        "commit": "b37b344d3f0a1c",
        "changed": True,
    }
    (run.folder / "launches.jsonl").write_text(json.dumps(launch) + "\n")
    state = MachineState(
        BEGIN, 0.5, 1 << 30, 1 << 31, 0.0, 1e6, 1 << 35, {"GPU 0": 0.75}, {"GPU 0": 0.25}
    )
    samples = [json.dumps(asdict(replace(state, at=BEGIN + second))) for second in range(30)]
    (run.folder / "machine.jsonl").write_text("\n".join(samples) + "\n")
    status = json.loads((run.folder / "status.json").read_text())
    ending = Ending(
        "failed",
        "out of memory",
        "EngineError",
        "2027-01-15T08:02:05+00:00",
        3,
        2,
        "agentrl train --resume a",
    )
    (run.folder / "status.json").write_text(json.dumps({**status, "ended": ending.as_row()}))
    return tmp_path / "a"


def click_at(page: Page, metric: str, step: int, *, times: int = 1) -> None:
    """Click on the point of a metric's line at a step, of a run of three steps or evaluations."""
    from selenium.webdriver import ActionChains

    page.wait(
        lambda: page.script(
            "return document.querySelector(arguments[0])", f"[data-metric='{metric}'] svg"
        )
    )
    svg = page.browser.find_element("css selector", f"[data-metric='{metric}'] svg")
    page.script("arguments[0].scrollIntoView({block: 'center'})", svg)
    tick = next(
        one for one in svg.find_elements("css selector", "[data-axis=x]") if one.text == str(step)
    )
    x = tick.rect["x"] + tick.rect["width"] / 2 - svg.rect["x"] - svg.rect["width"] / 2
    action = ActionChains(page.browser).move_to_element_with_offset(svg, x, 0)
    (action.click() if times == 1 else action.double_click()).perform()


@pytest.mark.long
def test_a_click_on_a_point_leads_to_the_episodes_of_that_step(serve, watched):
    page = serve(watched)
    page.open("#/run?runs=watched")
    click_at(page, "reward", 1)
    page.wait(lambda: len(page.texts("tbody tr")) == 16)
    assert set(page.texts("tbody td:nth-child(2)")) == {"1"}
    page.open("#/run?runs=watched")
    click_at(page, "eval/success", 2)
    page.wait(lambda: page.texts("tbody .badge") == ["held out"] * 2)
    assert set(page.texts("tbody td:nth-child(2)")) == {"2"}
    page.open("#/run?runs=watched")
    page.wait(lambda: page.texts("[data-metric=reward] svg"))
    page.script("const svg = document.querySelector('[data-metric=reward] svg'); svg.focus()")
    # Left, left, Enter.
    page.browser.switch_to.active_element.send_keys("\ue012", "\ue012", "\ue007")
    page.wait(lambda: set(page.texts("tbody td:nth-child(2)")) == {"1"})


@pytest.mark.long
def test_a_double_click_shows_the_whole_range_and_leads_nowhere(serve, watched):
    page = serve(watched)
    page.open("#/run?runs=watched")
    page.wait(lambda: page.texts("[data-metric=reward] svg"))
    page.script(
        """
        const svg = document.querySelector("[data-metric=reward] svg");
        const box = svg.getBoundingClientRect();
        const at = (kind, share) => svg.dispatchEvent(new PointerEvent(kind, {
          bubbles: true, pointerId: 1,
          clientX: box.left + share * box.width, clientY: box.top + 50 }));
        svg.setPointerCapture = () => {};
        at("pointerdown", 0.5); at("pointermove", 0.9); at("pointerup", 0.9);"""
    )
    whole = (
        "return [...document.querySelectorAll('button')].find((b) => b.textContent === 'whole"
        " range').hidden"
    )
    assert page.script(whole) is False
    click_at(page, "reward", 2, times=2)
    page.wait(lambda: page.script(whole))
    time.sleep(0.5)  # longer than a first click waits for a second one
    assert page.script("return location.hash").startswith("#/run")


@pytest.mark.long
def test_a_held_out_task_is_followed_over_all_evaluations(serve, watched):
    page = serve(watched)
    page.open("#/heldout?runs=watched")
    assert page.texts(".lead") == [
        "Of 2 tasks, 1 was solved after 0 steps and 1 after 2; 1 that was solved before is not any"
        " more, and 0 never were."
    ]
    assert page.texts("tbody tr:nth-child(2) td") == [
        "held_out-000000",
        "×✓✓",
        "after 1",
        "1 after 1",
        "0 after 0",
        "1",
        "+1",
    ]
    assert page.texts("tbody tr:nth-child(3) .cell") == ["✓", "×", "×"]
    page.script("document.querySelector('tbody tr:nth-child(3) .cell:nth-child(2)').click()")
    page.wait(lambda: page.texts("h1") == ["held_out-000001 held out"])
    assert "was played to evaluate the weights after 1 steps" in page.texts(".fate")[0]
    page.press("u")
    page.wait(lambda: page.texts("#total") == ["1 to 6 of 6"])


@pytest.mark.long
def test_tools_are_told_by_name_and_lead_to_their_episodes(serve, watched):
    page = serve(watched)
    page.open("#/tools?runs=watched")
    rows = [page.texts(f"tbody tr:nth-child({number}) td") for number in (1, 2)]
    assert rows == [
        ["search", "96", "0", "0.0 %", "100 ms", "100 ms", "9.6 s", "48"],
        ["submit", "48", "48", "100.0 %", "200 ms", "200 ms", "9.6 s", "48"],
    ]
    page.wait(lambda: len(page.texts(".chart svg")) == 3)
    page.script("document.querySelector('tbody tr:nth-child(2) td:nth-child(3) a').click()")
    page.wait(lambda: page.texts("#total") == ["1 to 48 of 48"])
    assert "a call of submit failed" in page.texts(".bar .badge")


@pytest.mark.long
def test_alarms_stand_on_the_charts_that_they_are_about(serve, watched):
    page = serve(watched)
    page.open("#/run?runs=watched")
    page.wait(lambda: page.script("return document.querySelectorAll('.chart .alarm').length === 2"))
    found = page.script(
        "return [...document.querySelectorAll('.alarm')].map((a) => "
        "[a.closest('.chart').dataset.metric, a.dataset.step])"
    )
    # Of an earlier release: at the reward.
    assert sorted(found) == [
        ["entropy", "1"],
        ["reward", "2"],
    ]
    page.script("document.querySelector('[data-metric=entropy] svg').focus()")
    page.browser.switch_to.active_element.send_keys("\ue014", "\ue014")
    assert "in step 2: the norm of the gradient is large <b>" in page.texts("#tip span")
    page.script(
        "[...document.querySelectorAll('.warning a')].find((a) => a.textContent === 'its"
        " episodes').click()"
    )
    page.wait(lambda: set(page.texts("tbody td:nth-child(2)")) == {"1"})


@pytest.mark.long
def test_why_a_run_ended_and_what_is_known_of_it_stand_above_its_curves(serve, watched):
    with (watched / "watched" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 3, "eval/success": 1.0, "eval/failed": 3.0}) + "\n")
    page = serve(watched)
    page.open("#/run?runs=watched")
    assert page.texts("[aria-label='why the run ended'] p") == [
        "EngineError: out of memory",
        "It goes on after 2 steps with agentrl train --resume a",
    ]
    figures = dict(zip(page.texts(".facts dt"), page.texts(".facts dd"), strict=True))
    assert figures["held out"].endswith("(3 failed)")
    facts = dict(zip(page.texts(".about dt"), page.texts(".about dd"), strict=True))
    assert (facts["duration"], facts["host"], facts["commit"]) == (
        "2 min 5 s",
        "node-17",
        "b37b344d3f + changes",
    )
    assert (facts["tags"].strip(), page.texts(".notes")) == ("baseline", ["Longer budget."])
    assert facts["started"].startswith("2027-01-15")


@pytest.mark.long
def test_the_machine_stands_beside_the_lanes(serve, watched):
    page = serve(watched)
    page.open("#/time?runs=watched")
    machine = ["CPU", "memory", "GPU 0", "GPU 0 memory", "disk reads", "disk writes"]
    assert page.texts("[aria-label='what was busy when'] .lane-name")[-len(machine) :] == machine


@pytest.mark.long
@pytest.mark.parametrize(
    "steps",
    [pytest.param(1, marks=pytest.mark.long), 2, pytest.param(9, marks=pytest.mark.long)],
)
def test_every_axis_has_three_numbers_or_more(serve, tmp_path, steps):
    run = MadeUpRun(tmp_path / "run", groups=2, members=2)
    run.begin()
    for _ in range(steps):
        run.step()
    page = serve(tmp_path)
    page.open("#/run?runs=run")
    page.press("a")
    few = """
        return [...document.querySelectorAll(".chart svg")].map((svg) => [
          svg.closest(".chart").dataset.metric, svg.querySelectorAll("[data-axis=x]").length,
          svg.querySelectorAll(".tick:not([data-axis=x])").length,
        ]).filter(([, x, y]) => x < 3 || y < 3);"""
    for _ in range(2):
        page.wait(lambda: page.script("return document.querySelectorAll('.chart svg').length > 5"))
        assert page.script(few) == []
        page.press("l")  # now logarithmic
    page.open("#/time?runs=run")
    page.wait(lambda: page.texts(".time-axis span"))
    assert len(page.texts(".time-axis span")) >= 3
    assert len(page.texts("[aria-label='what was busy when'] .tick")) >= 3 + 3
    page.open("#/episodes?runs=run")
    marks = len(page.texts(".score-axis span"))
    assert marks >= 3 or not page.texts(".histogram")


@pytest.mark.long
def test_the_configs_of_a_run_are_told_with_what_they_changed(serve, runs):
    rows = [
        {"config": 0, "step": 0, "at": "2027-01-15T08:00:00+00:00", "changed": {}},
        {
            "config": 1,
            "step": 2,
            "at": "2027-01-15T09:00:00+00:00",
            "changed": {"trainer.lr": [1e-3, 2e-3]},
        },
    ]
    (runs / "first" / "changes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (runs / "first" / "config.0.yaml").write_text("trainer: {lr: 0.125}")
    page = serve(runs)
    page.open("#/config?runs=first")
    assert page.texts(".history .mono") == ["trainer.lr: 0.001 → 0.002"]
    assert "0.001" in page.texts("tbody td")
    page.script("document.querySelector('.history a').click()")
    page.wait(lambda: page.texts("tbody td") == ["trainer.lr", "0.125", ""])
    assert page.texts(".history [aria-current]") == ["config 0"]


@pytest.mark.long
def test_long_names_of_runs_are_cut_in_the_middle(serve, tmp_path):
    names = [f"frozen_lake-qwen3-0.6b-groups32-staleness1-seed{seed}" for seed in (1, 2)]
    for name in names:
        run = MadeUpRun(tmp_path / name)
        run.begin()
        run.step()
    page = serve(tmp_path)
    page.open(f"#/run?runs={','.join(names)}")
    assert page.texts(".chip") == [f"frozen_lake-qwen3-…-staleness1-seed{seed}" for seed in (1, 2)]
    assert page.script("return document.querySelector('.chip').title").startswith(names[0])
    page.open(f"#/config?runs={','.join(names)}")
    assert page.texts("th")[1] == "frozen_lake-qwen3-…-staleness1-seed1"


def test_a_report_is_drawn_without_a_server_and_runs_no_text_of_a_run(browser, tmp_path):
    run = MadeUpRun(
        tmp_path / "run", texts=HOSTILE, env=HOSTILE[0], settings={HOSTILE[1]: HOSTILE[2]}
    )
    run.begin()
    run.step()
    run.step()
    write_report(run.folder, tmp_path / "report.html")
    page = Page(browser, "")
    page.requested()
    page.complaints()
    browser.get((tmp_path / "report.html").as_uri())
    assert browser.title == "run · agentrl report"
    assert (
        page.script("return document.querySelectorAll('script, iframe, img, form, a').length") == 0
    )
    assert HOSTILE[0] in page.texts(".words")
    assert (
        page.script("return document.querySelector('path.line').getBoundingClientRect().width")
        > 100
    )
    page.script("for (const each of document.querySelectorAll('details')) each.open = true")
    try:
        browser.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": True},
        )
        assert page.script("return document.documentElement.scrollWidth") <= 390
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert page.requested() == {""}  # the file itself
    assert page.complaints() == []


@pytest.mark.long
def test_what_environments_draw_is_in_a_report_and_can_do_nothing_else_there(browser, tmp_path):
    run = MadeUpRun(tmp_path / "run", turns=len(PICTURES), pictures=PICTURES, groups=1, members=2)
    run.begin()
    run.step()
    write_report(run.folder, tmp_path / "report.html")
    page = Page(browser, "")
    page.requested()
    browser.get((tmp_path / "report.html").as_uri())
    page.script("for (const each of document.querySelectorAll('details')) each.open = true")
    look_into_frames(page, 2 * (len(PICTURES) + 1))
    assert browser.title == "run · agentrl report"
    assert page.script("return location.href") == (tmp_path / "report.html").as_uri()
    assert page.requested() == {""}  # the file itself
