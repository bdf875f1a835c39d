"""`areal-core eval MODEL ... --data ...`: samples what is missing, prints the tables and writes them into a folder."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

from areal_core.assets import resolve_model
from areal_core.errors import ConfigError
from areal_core.evaluate import table
from areal_core.evaluate.data import load_data_sets, split_label
from areal_core.evaluate.page import render_page
from areal_core.evaluate.progress import Progress
from areal_core.evaluate.results import ModelSource, Results, SamplingSettings
from areal_core.evaluate.sampling import sample_model
from areal_core.evaluate.summary import Summary, check_k, summarize
from areal_core.telemetry.jsonl import json_value, replace_file

__all__ = ["compare_command"]

DEFAULT_OUTPUT = "runs/eval"
TEXT_FILE, MARKDOWN_FILE, JSON_FILE, PAGE_FILE = "table.txt", "table.md", "summary.json", "evaluation.html"
_SAMPLING = ("samples", "temperature", "top_p", "top_k", "max_new_tokens", "seed", "template")


def compare_command(args: Namespace) -> int:
    """Evaluate models side by side; `args` has what was given on the command line, and nothing else.

    Raises: ConfigError for what cannot be evaluated, or an output folder that holds another evaluation.
    """
    given = vars(args)
    if given.get("temperature") == 0:
        given.setdefault("samples", 1)
    settings = SamplingSettings(**{name: given[name] for name in _SAMPLING if name in given})
    ks = check_k(given.get("k", [1]), settings.samples)
    data_sets = load_data_sets(args.data, given.get("problems"))
    models = open_models([*args.models, *args.overrides])
    folder = Path(given.get("output", DEFAULT_OUTPUT))
    with Results(folder, settings, models, data_sets) as results:
        with Progress([m.label for m in models], data_sets, results) as progress:
            for model in models:
                sample_model(
                    model,
                    data_sets,
                    results,
                    settings,
                    progress.of(model.label),
                    slots=given.get("slots", 256),
                    threads=given.get("threads", 1),
                )
        summary = summarize(results, models, data_sets, settings, ks)
        page = render_page(summary, data_sets, results)
    content = json.dumps(json_value(summary.to_dict()), indent=2) + "\n"
    report = text_report(summary)
    replace_file(folder / JSON_FILE, content.encode())
    replace_file(folder / TEXT_FILE, report.encode())
    replace_file(folder / MARKDOWN_FILE, markdown_report(summary).encode())
    replace_file(folder / PAGE_FILE, page.encode("utf-8", errors="xmlcharrefreplace"))
    if given.get("json"):
        print(content, end="")
    else:
        print(f"{report}\npage: {folder / PAGE_FILE}")
    return 0


def open_models(words: list[str]) -> list[ModelSource]:
    """Resolve every ``[LABEL=]MODEL``; raises ConfigError for a label used twice."""
    models: list[ModelSource] = []
    for word in words:
        label, name = split_label(word) if not Path(word).is_dir() else (None, word)
        if any(model.label == (label or name) for model in models):
            raise ConfigError(f"MODEL: expected different labels, got {label or name!r} twice; write LABEL={name}")
        models.append(ModelSource.open(label or name, resolve_model(name, f"MODEL {label or name}")))
    return models


def text_report(summary: Summary) -> str:
    """All tables as text."""
    parts = [table.text(table.overview(summary)), table.caption(summary)]
    return "\n\n".join([*parts, *map(table.text, table.details(summary))]) + "\n"


def markdown_report(summary: Summary) -> str:
    """All tables as Markdown."""
    parts = [table.markdown(table.overview(summary)), table.caption(summary)]
    return "\n\n".join([*parts, *map(table.markdown, table.details(summary))]) + "\n"
