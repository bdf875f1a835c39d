"""What a run shows: metrics, a trace of all loops, a live display, and a report.

Everything lies in the folder of the run: `metrics.jsonl` and `tensorboard/` (`MetricsLog`), `samples.jsonl`
(`SampleLog`), `events.jsonl` (`EventLog`), `trace.json` (`Tracer`). `write_report` turns it into `report.html`.
"""

from areal_core.telemetry.metrics import EventLog, MetricsLog, SampleLog, read_metrics
from areal_core.telemetry.progress import Progress
from areal_core.telemetry.report import report_command, write_report
from areal_core.telemetry.summary import plot_summary
from areal_core.telemetry.timeline_svg import plot_timelines
from areal_core.telemetry.trace import Span, SpanRecorder, Tracer, now_us, read_trace

__all__ = [
    "EventLog",
    "MetricsLog",
    "Progress",
    "SampleLog",
    "Span",
    "SpanRecorder",
    "Tracer",
    "now_us",
    "plot_summary",
    "plot_timelines",
    "read_metrics",
    "read_trace",
    "report_command",
    "write_report",
]
