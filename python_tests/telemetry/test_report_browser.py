"""Opens reports in a headless Chromium, when there is one: the scripts run through, draw, and log no error."""

import json
import re
import shutil
import subprocess

import pytest
from synthetic_run import SyntheticRun, write_synthetic_run

from areal_core.telemetry import MetricsLog, write_report

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on PATH")

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--v=0",
    "--virtual-time-budget=3000",
]


def open_page(path, profile, width=1280):
    """The page after its scripts ran, and what they wrote to the console."""
    flags = [*FLAGS, f"--user-data-dir={profile}", f"--window-size={width},2000", "--dump-dom"]
    result = subprocess.run([BROWSER, *flags, path.as_uri()], capture_output=True, text=True, timeout=120, check=True)
    return result.stdout, [line for line in result.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.parametrize("width", [1280, 420])
def test_a_finished_run(tmp_path, width):
    write_synthetic_run(tmp_path / "run", 60)
    dom, console = open_page(write_report(tmp_path / "run"), tmp_path / "profile", width)
    assert console == []
    assert 'data-ready="true"' in dom
    assert dom.count("<figure") == 19
    curves = re.findall(r'class="curve" d="([^"]*)"', dom)
    assert len(curves) > 20
    assert all(curve.startswith("M") for curve in curves)
    assert "NaN" not in re.sub(r"<script.*?</script>", "", dom, flags=re.DOTALL)
    assert dom.count("<canvas") == 2
    assert dom.count('class="share-bar"') == 2
    assert 'class="token' in dom


def test_a_critic_and_a_reference_have_panels(tmp_path):
    write_synthetic_run(tmp_path / "run", 20)
    metrics = tmp_path / "run" / "metrics.jsonl"
    more = {
        "critic/loss": 0.1,
        "critic/grad_norm": 2.0,
        "reward/kl_per_response": 3.0,
        "loss/kl_current_reference": 0.0,
    }
    rows = [json.loads(line) | more for line in metrics.read_text().splitlines()]
    metrics.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    dom, console = open_page(write_report(tmp_path / "run"), tmp_path / "profile")
    assert console == []
    titles = re.findall(r"<figcaption[^>]*><span>([^<]*)", dom)
    assert "Value loss" in titles
    assert "KL to the reference, nats per response" in titles
    assert "KL to the reference, nats per token" not in titles, "the loss has no such term: 0 in every step"
    assert "of the critic" in dom


# Touches everything a reader can touch, then leaves a mark with what the clicks should have changed.
EVERYTHING = """
setTimeout(() => {
  const all = (selector) => [...document.querySelectorAll(selector)];
  for (const button of all("button")) button.click();
  for (const details of all("details")) details.open = true;
  for (const slider of all("input")) {
    for (const value of [slider.min, slider.max]) { slider.value = value; slider.dispatchEvent(new Event("input")); }
  }
  for (const node of all("svg, svg rect, canvas, .token, .share-bar span")) {
    const box = node.getBoundingClientRect();
    for (const share of [0.02, 0.3, 0.98]) {
      const [clientX, clientY] = [box.left + share * box.width, box.top + box.height / 2];
      const at = { clientX, clientY, bubbles: true, buttons: 1 };
      for (const kind of ["pointermove", "pointerleave"]) node.dispatchEvent(new PointerEvent(kind, at));
    }
  }
  const canvas = all("canvas.main")[0];
  if (canvas) {
    for (const key of ["ArrowLeft", "ArrowRight", "+", "+", "-", "Home", "0", "x"]) {
      canvas.dispatchEvent(new KeyboardEvent("keydown", { key }));
    }
    canvas.dispatchEvent(new WheelEvent("wheel", { deltaY: -900, ctrlKey: true, cancelable: true }));
    canvas.dispatchEvent(new WheelEvent("wheel", { deltaX: 40, cancelable: true }));
    canvas.dispatchEvent(new MouseEvent("dblclick", { clientX: 500 }));
  }
  const mark = all("#axis [aria-pressed=true]")[0].dataset.value;
  setTimeout(() => { document.documentElement.dataset.touched = mark; }, 300);
}, 300);
"""


def test_everything_can_be_touched(tmp_path, monkeypatch):
    monkeypatch.setattr("areal_core.telemetry.report_data.MAX_SEGMENTS", 300)  # so that the timeline has excerpts
    write_synthetic_run(tmp_path / "run", 60)
    path = write_report(tmp_path / "run")
    page = path.read_text(encoding="utf-8").replace("</body>", f"<script>{EVERYTHING}</script></body>")
    path.write_text(page, encoding="utf-8")
    dom, console = open_page(path, tmp_path / "profile")
    assert console == []
    assert 'data-touched="time"' in dom
    assert 'data-theme="dark"' in dom
    assert "NaN" not in re.sub(r"<script.*?</script>", "", dom, flags=re.DOTALL)


def write_nothing(run_dir):
    run_dir.mkdir()


def write_one_step(run_dir):
    write_synthetic_run(run_dir, 1)


def write_only_odd_metrics(run_dir):
    with MetricsLog(run_dir, tensorboard=False) as log:
        log.log({"step": 0, "loss/loss": float("nan"), "custom/score": -3.0, "loss/behavior_weight_max": 0.0})
        log.log({"step": 7, "custom/score": -3.0, "loss/behavior_weight_max": 1e9, "staleness/histogram": []})


def write_no_trace(run_dir):
    write_synthetic_run(run_dir, 12)
    (run_dir / "trace.json").unlink()


def write_resumed(run_dir):
    run = SyntheticRun(run_dir, planned=60, eta=0, generators=20)
    run.write(1, 20)
    run.event("interrupted", 20, "Ctrl-C")
    run.time.us += 30_000_000
    run.write(11, 30, resume_step=10)


@pytest.mark.parametrize(
    "write", [write_nothing, write_one_step, write_only_odd_metrics, write_no_trace, write_resumed]
)
def test_partial_runs(tmp_path, write):
    write(tmp_path / "run")
    dom, console = open_page(write_report(tmp_path / "run"), tmp_path / "profile")
    assert console == []
    assert 'data-ready="true"' in dom
    assert "NaN" not in re.sub(r"<script.*?</script>", "", dom, flags=re.DOTALL)


def test_a_script_error_would_be_seen(tmp_path):
    page = tmp_path / "broken.html"
    page.write_text("<!doctype html><script>undefined_function();</script>")
    _, console = open_page(page, tmp_path / "profile")
    assert any("undefined_function" in line for line in console)
