"""The dashboard in a browser that wants to be attacked: texts of a record, other sites, other names, odd paths."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, expect
from tests.browser import DashboardProcess
from tests.pages.hostile_record import HIDDEN, write_hostile_run
from tests.pages.page_visit import DashboardThread, Visit, profile, visit

PAGES = ("overview", "metrics", "rollouts", "timeline", "infra", "evals", "logs", "code")
LONGEST_ELEMENTS = 30_000
"""A page that put 10 MB into the document would have more, or none that ends in time."""


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DashboardProcess]:
    """A server over the hostile run alone, reachable from other machines: it has a token."""
    folder = tmp_path_factory.mktemp("hostile")
    write_hostile_run(folder / "hostile")
    with DashboardProcess("--host", "0.0.0.0", folder) as process:
        yield process


@pytest.fixture(scope="module")
def attacked_profile(browser: Browser, hostile: DashboardProcess) -> Iterator[BrowserContext]:
    """A profile with the cookie of the printed address."""
    with profile(browser) as context:
        page = context.new_page()
        page.goto(f"http://localhost:{hostile.port}/?{hostile.address.partition('?')[2]}")
        page.close()
        yield context


@pytest.fixture
def attacked(attacked_profile: BrowserContext, hostile: DashboardProcess) -> Iterator[Visit]:
    """A page over the hostile run."""
    page = attacked_profile.new_page()
    yield Visit(page, f"http://localhost:{hostile.port}")
    page.close()


SHOWN = """() => [
  document.title, document.body.innerText,
  ...[...document.querySelectorAll("option, title")].map((one) => one.textContent),
  ...[...document.querySelectorAll("[title], [aria-label]")].flatMap((one) => [one.title, one.ariaLabel]),
].join("\\n")"""
"""Every text that a page shows or says."""


def assert_unharmed(attacked: Visit) -> None:
    page = attacked.page
    shown = page.evaluate(SHOWN)
    assert {f"U+{ord(one):04X}": shown[shown.index(one) - 80 :][:160] for one in HIDDEN if one in shown} == {}
    assert page.evaluate("() => window.attacked") is None
    assert [url for url in attacked.requested if not url.startswith((attacked.address, "data:", "blob:"))] == []
    assert page.locator("main script, main iframe, main img, main style, main base, main meta").count() == 0
    assert page.locator("a[href^='javascript:' i], a[href^='data:' i]").count() == 0
    assert page.evaluate("() => document.querySelectorAll('*').length") < LONGEST_ELEMENTS
    # A refusal of the content security policy would be an error of the console: nothing even tries.
    assert attacked.problems == []


@pytest.mark.parametrize("name", ["runs", *PAGES])
def test_texts_of_a_record_never_act(attacked: Visit, name: str):
    page = attacked.open(f"hostile/{name}" if name != "runs" else "")
    if name == "logs":
        expect(page.locator(".lg").first).to_be_visible()  # its lines come after the page has settled
    assert_unharmed(attacked)
    if name != "runs":
        expect(page.get_by_role("banner")).to_contain_text("<script>window.attacked = 1</script>")


@pytest.mark.parametrize("view", ["text", "raw"])
@pytest.mark.parametrize("sample", ["0-0", "0-1"])
def test_an_answer_is_shown_as_it_is(attacked: Visit, sample: str, view: str):
    page = attacked.open("hostile/rollouts", {"step": 0, "sample": sample, "view": view})
    conversation = page.get_by_label("Conversation")
    if sample == "0-0":
        expect(conversation).to_contain_text("<script>window.attacked = 1</script>")
        expect(conversation).to_contain_text("ESC[31m")
        expect(conversation).to_contain_text("U+202E")
        if view == "text":
            expect(conversation).to_contain_text("[image a picture, not loaded]")
    else:
        expect(conversation).to_contain_text("more characters")
    assert_unharmed(attacked)


def test_the_policy_of_the_pages_ends_what_would_get_through(visitor: Visit):
    page = visitor.open("")
    page.evaluate(
        """() => {
          window.refused = new Set();
          document.addEventListener("securitypolicyviolation", (event) => refused.add(event.effectiveDirective));
          const add = (name, properties) =>
            document.body.append(Object.assign(document.createElement(name), properties));
          add("script", { textContent: "window.attacked = 1" });
          add("script", { src: "http://elsewhere.example/a.js" });
          add("img", { src: "http://elsewhere.example/a.png" });
          add("iframe", { src: "http://elsewhere.example/" });
          add("link", { rel: "stylesheet", href: "http://elsewhere.example/a.css" });
          add("object", { data: "http://elsewhere.example/a" });
          add("video", { src: "http://elsewhere.example/a.mp4" });
          void fetch("http://elsewhere.example/").catch(() => undefined);
        }"""
    )
    kinds = ["connect-src", "frame-src", "img-src", "media-src", "object-src", "script-src-elem", "style-src-elem"]
    page.wait_for_function("(kinds) => kinds.every((kind) => window.refused.has(kind))", arg=kinds)
    visitor.problems.clear()
    assert page.evaluate("() => window.attacked") is None


ATTACKER = b"""<!doctype html><title>other site</title><script>
const tried = {};
const read = async (name, address, settings) => {
  try { tried[name] = await (await fetch(address, settings)).text(); } catch { tried[name] = "refused"; }
};
const events = (address) => new Promise((done) => {
  const source = new EventSource(address);
  source.onopen = () => done("opened");
  source.onerror = () => { source.close(); done("refused"); };
});
const frame = (address) => new Promise((done) => {
  const element = document.createElement("iframe");
  element.src = address;
  element.onload = () => { try { done(element.contentDocument.title || "refused"); } catch { done("refused"); } };
  document.documentElement.append(element);
});
const script = (address) => new Promise((done) => {
  const element = document.createElement("script");
  element.src = address;
  element.onload = () => done("loaded");
  element.onerror = () => done("refused");
  document.documentElement.append(element);
});
(async () => {
  const target = new URLSearchParams(location.search).get("target");
  await read("fetch", target + "/api/runs", {});
  await read("with cookies", target + "/api/runs", { credentials: "include" });
  await read("put", target + "/api/runs", { method: "PUT", body: "{}" });
  tried.events = await events(target + "/api/events?run=first");
  tried.frame = await frame(target + "/");
  tried.script = await script(target + "/api/runs");
  window.tried = tried;
})();
</script>"""


class OtherSite(BaseHTTPRequestHandler):
    """A site that tries to read the dashboard."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(ATTACKER)

    def log_message(self, *_: object) -> None:
        """Prints nothing."""


def test_another_site_reads_nothing(browser: Browser, dashboard: DashboardThread):
    with ThreadingHTTPServer(("127.0.0.1", 0), OtherSite) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        with visit(browser, dashboard.address) as opened:
            target = dashboard.address.rstrip("/")
            opened.page.goto(f"http://127.0.0.1:{other.server_port}/?target={target}")
            opened.page.wait_for_function("() => window.tried")
            tried = opened.page.evaluate("() => window.tried")
        other.shutdown()
    assert tried == dict.fromkeys(("fetch", "with cookies", "put", "events", "frame", "script"), "refused")


def test_another_name_of_this_machine_is_refused(browser: Browser, dashboard: DashboardThread):
    # The browser of the tests resolves every name below `.example` to this machine, as a rebound name would be.
    with visit(browser, dashboard.address) as opened:
        answer = opened.page.goto(f"http://rebound.example:{dashboard.port}/api/runs")
        assert answer.status == 403


def test_beyond_loopback_the_printed_address_opens_the_pages_and_no_other(browser: Browser, hostile: DashboardProcess):
    here = f"http://localhost:{hostile.port}/"
    with visit(browser, here) as opened:
        for path in ("", "api/runs", "api/events?run=hostile", "assets/index.js", "?token=guess"):
            answer = opened.page.goto(here + path)
            assert answer.status == 401
        opened.page.goto(here + "?" + hostile.address.partition("?")[2])
        expect(opened.page.get_by_role("table")).to_contain_text("hostile")
        assert "token" not in opened.page.url
        assert opened.page.evaluate("() => document.cookie") == ""


@pytest.mark.parametrize(
    "path",
    [
        *(
            "//etc/passwd",
            "/../../../../etc/passwd",
            "/%2e%2e/%2e%2e/%2e%2e/etc/passwd",
            "/..%2f..%2f..%2fetc%2fpasswd",
        ),
        *("/assets/../../../../../etc/passwd", "/assets/%2e%2e%2f%2e%2e%2fapp.py", "/assets/..%5c..%5capp.py"),
        *(
            "/api/runs/..%2f..%2fetc/steps",
            "/api/runs/%2e%2e/steps",
            "/api/runs//etc/passwd/steps",
            "/%00",
            "/%c0%ae%c0%ae/",
        ),
        *("/api/runs/first/samples/1/..%2f..%2f..%2frun.json", "/api/runs/first%2f..%2fsecond", "http://etc/passwd"),
    ],
)
def test_no_path_leads_out_of_the_folders(dashboard: DashboardThread, runs: Path, path: str):
    connection = http.client.HTTPConnection("127.0.0.1", dashboard.port, timeout=20)
    connection.putrequest("GET", path, skip_host=True)  # as it is, where a browser would shorten it first
    connection.putheader("Host", "localhost")
    connection.endheaders()
    answer = connection.getresponse()
    text = answer.read().decode(errors="replace")
    connection.close()
    assert answer.status in (400, 403, 404) or '<div id="root">' in text
    assert not any(secret in text for secret in ("root:", "create_app", "run_id", str(runs)))


def test_hostile_names_are_text_in_the_palette_too(attacked: Visit):
    page = attacked.open("hostile/overview")
    page.keyboard.press("Control+k")
    page.keyboard.type("attacked")
    expect(page.get_by_role("option").first).to_contain_text("window.attacked")
    assert_unharmed(attacked)
