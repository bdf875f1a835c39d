"""What a run shows: metrics, a trace of all loops, a live display, and a report.

Everything lies in the folder of the run: `metrics.jsonl` and `tensorboard/` (`MetricsLog`), `samples.jsonl`
(`SampleLog`), `events.jsonl` (`EventLog`), `trace.json` (`Tracer`).
"""

from areal_core.telemetry.metrics import EventLog, MetricsLog, SampleLog, read_metrics
from areal_core.telemetry.progress import Progress
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
    "read_metrics",
    "read_trace",
]
