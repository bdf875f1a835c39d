"""The sweep as a picture and as one HTML page that needs nothing but itself."""

from __future__ import annotations

import html
from pathlib import Path

from areal_core import __version__
from areal_core.errors import MissingPackageError
from areal_core.simulate.sweep import Sweep
from areal_core.telemetry import svg
from areal_core.telemetry.assets import asset
from areal_core.telemetry.format import compact, percent

__all__ = ["draw_sweep", "render_page", "save_png", "sweep_rows", "sweep_title"]

HEAD = ("GPUs that generate", "eta", "tokens/s", "step", "generators idle", "trainer idle", "mean age")
_COLOURS = ("#2f6db3", "#c8551b", "#0b7a5c", "#8a4fa3", "#a63d62", "#7d6a1e", "#4d3a77", "#5f5e5a")
_WIDTH, _HEIGHT = 720, 380


def sweep_title(sweep: Sweep) -> str:
    """Which cluster and model."""
    config = sweep.config
    rollout = config.rollout
    return (
        f"{config.model.name} on {config.cluster.gpus} GPUs, batches of {rollout.batch_groups} x {rollout.group_size}"
    )


def sweep_rows(sweep: Sweep) -> list[tuple[str, ...]]:
    """The table as text, in the order of HEAD; the highest throughput and the advice are marked."""
    rows: list[tuple[str, ...]] = []
    for (share, eta), result in sweep.results.items():
        mark = " (best)" if (share, eta) == sweep.best else " (advised)" if (share, eta) == sweep.advice else ""
        rows.append(
            (
                f"{result.config.generator_gpus} ({percent(share)})",
                f"{eta:g}",
                f"{compact(result.tokens_per_s)}{mark}",
                f"{result.step_s:.1f} s",
                percent(result.generator_idle) or "",
                percent(result.trainer_idle) or "",
                f"{result.mean_age:.2f}",
            )
        )
    return rows


def advice(sweep: Sweep) -> str:
    """The answer in a sentence."""
    (share, eta), (best_share, best_eta) = sweep.advice, sweep.best
    result, best = sweep.results[share, eta], sweep.results[best_share, best_eta]
    generates = result.config.generator_gpus
    text = f"Let {generates} of {sweep.config.cluster.gpus} GPUs generate, with eta {eta:g}: "
    text += f"{compact(result.tokens_per_s)} tokens/s"
    if (share, eta) != (best_share, best_eta):
        text += (
            f"; the best, {best.config.generator_gpus} GPUs with eta {best_eta:g}, reach {compact(best.tokens_per_s)}"
        )
    return text + "."


def draw_sweep(sweep: Sweep) -> str:
    """Throughput over the share of generators, a line for each eta, as SVG text."""
    box = svg.Box(64, 54, _WIDTH - 92, _HEIGHT - 46)
    highest = max(result.tokens_per_s for result in sweep.results.values()) * 1.06
    x = svg.scale(sweep.shares[0], sweep.shares[-1], box.left, box.right)
    y = svg.scale(0.0, highest, box.bottom, box.top)
    parts = [svg.text(20, 28, f"Tokens trained per second: {sweep_title(sweep)}", "ink title")]
    for level in svg.ticks(0.0, highest, 5):
        parts.append(svg.line(box.left, y(level), box.right, y(level), "grid"))
        parts.append(svg.text(box.left - 8, y(level) + 4, compact(level) or "", "soft number", "end"))
    for share in sweep.shares:
        parts.append(svg.text(x(share), box.bottom + 16, percent(share) or "", "soft number", "middle"))
    parts.append(
        svg.text((box.left + box.right) / 2, box.bottom + 34, "share of the GPUs that generate", "soft", "middle")
    )
    taken: list[float] = []
    for index, eta in reversed(list(enumerate(sweep.etas))):
        kind = f"e{index % len(_COLOURS)}"
        line = [(x(share), y(sweep.results[share, eta].tokens_per_s)) for share in sweep.shares]
        parts.append(svg.polyline(line, f"curve {kind}"))
        parts += [svg.dot(*point, f"{kind}-fill") for point in line]
        label = max([line[-1][1] + 4, *(height + 13 for height in taken)])
        taken.append(label)
        parts.append(svg.text(box.right + 10, label, f"eta {eta:g}", f"{kind}-fill"))
    style = asset("summary.css") + "".join(
        f".e{i} {{ stroke: {colour}; }} .e{i}-fill {{ fill: {colour}; }}" for i, colour in enumerate(_COLOURS)
    )
    return svg.document(_WIDTH, _HEIGHT, f"Sweep: {sweep_title(sweep)}", style, parts)


def render_page(sweep: Sweep) -> str:
    """The picture, the answer and the table as HTML, in the look of the reports."""
    head = "".join(f"<th{' class=number' if index else ''}>{html.escape(name)}</th>" for index, name in enumerate(HEAD))
    body = ""
    for row in sweep_rows(sweep):
        numbers = "".join(f'<td class="number">{html.escape(cell)}</td>' for cell in row[1:])
        body += f"<tr><td>{html.escape(row[0])}</td>{numbers}</tr>"
    title = html.escape(sweep_title(sweep))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{asset('report.css')}\nfigure {{ margin: 1.4rem 0; max-width: 760px; }} "
        "figure svg { width: 100%; height: auto; }</style>\n</head>\n<body>\n<main>\n"
        '<p class="kicker">areal_core simulate</p>\n'
        f'<h1>How many GPUs should generate?</h1>\n<p class="summary">{title}. {html.escape(advice(sweep))}</p>\n'
        f"<figure>{draw_sweep(sweep)}</figure>\n"
        f'<table class="plain"><tr>{head}</tr>{body}</table>\n'
        '<p class="note">Tokens count prompts and responses of trained batches. Advised: the lowest eta within two per '
        "cent of the best, at the share that serves it best.</p>\n"
        f"<footer>Simulated by areal_core {html.escape(__version__)}.</footer>\n</main>\n</body>\n</html>\n"
    )


def save_png(sweep: Sweep, path: Path) -> None:
    """Write the picture as PNG.

    Raises:
        MissingPackageError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingPackageError("the PNG needs matplotlib, which is not installed: pip install matplotlib") from error
    figure = Figure(figsize=(7.2, 3.8), dpi=160, facecolor="#fdfcfa", layout="constrained")
    axes = figure.add_subplot(facecolor="#fdfcfa")
    for index, eta in enumerate(sweep.etas):
        values = [sweep.results[share, eta].tokens_per_s / 1e3 for share in sweep.shares]
        shares = [100 * share for share in sweep.shares]
        axes.plot(shares, values, "o-", color=_COLOURS[index % len(_COLOURS)], markersize=3.5, label=f"eta {eta:g}")
    axes.set_xlabel("share of the GPUs that generate, %")
    axes.set_ylabel("thousand tokens trained per second")
    axes.set_title(sweep_title(sweep), loc="left", fontsize=10)
    axes.set_ylim(bottom=0)
    axes.grid(color="#e6e4de")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path)
