"""Spans of a profile for collectors of OpenTelemetry, such as Jaeger and Grafana Tempo.

The library's own spans cost 30 to 80 microseconds each, too much for an event loop that makes
several for each turn of each episode. So they are made here, in the profiler's thread, of what the
event loop has noted.
"""

import hashlib
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from agentrl.errors import ConfigError
from agentrl.flow import Span
from agentrl.package.distribution import install_command

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_QUEUED = 1 << 16
_SECONDS = 5
"""Time for an answer of a collector, and for the last spans at the end, in seconds."""


class SpanExport:
    """Sends spans by OTLP over HTTP. OpenTelemetry's own variables say where to, and with which
    headers.

    Spans of one asyncio task, which is mostly a member of a group, have one trace id. A span's name
    is what was done, its attributes are `agentrl.resource`, `agentrl.worker` and `agentrl.task`;
    the service is `agentrl`, with the name of the run as its instance, unless `OTEL_SERVICE_NAME`
    says otherwise.

    Raises:
        ConfigError: the packages for it are not installed.
    """

    def __init__(self, run: str) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ConfigError(
                f"{_VARIABLES[1]} asks for spans by OpenTelemetry: {install_command('otel')}, or"
                " unset it"
            ) from error
        about = {
            "service.name": os.environ.get("OTEL_SERVICE_NAME", "agentrl"),
            "service.instance.id": run,
        }
        self._run = run
        self._ids = _ids()
        self._provider = TracerProvider(
            resource=Resource.create(about), id_generator=self._ids, shutdown_on_exit=False
        )
        exporter = OTLPSpanExporter(timeout=_SECONDS)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=_QUEUED))
        self._tracer: Tracer = self._provider.get_tracer("agentrl")

    @staticmethod
    def configured(run: str) -> "SpanExport | None":
        """The export that the environment asks for; None if it asks for none."""
        return SpanExport(run) if any(os.environ.get(name) for name in _VARIABLES) else None

    def send(self, ended: Iterable[Span], epoch: float) -> None:
        """Hand over spans, to be sent in the background. `epoch`: the Unix time when their clock
        showed 0.
        """
        from opentelemetry.context import Context

        for one in ended:
            self._ids.task = f"{self._run} {one.task or one.resource}"
            about: dict[str, Any] = {"agentrl.resource": one.resource, "agentrl.task": one.task}
            if one.worker is not None:
                about["agentrl.worker"] = one.worker
            begin, end = (round((at + epoch) * 1e9) for at in (one.begin, one.end))
            self._tracer.start_span(one.name, Context(), attributes=about, start_time=begin).end(
                end
            )

    def close(self) -> None:
        """Send the rest."""
        self._provider.force_flush(1000 * _SECONDS)
        self._provider.shutdown()


def _ids() -> Any:
    """A generator of ids whose trace ids follow from its `task`."""
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

    class TaskIds(RandomIdGenerator):
        task = ""

        def generate_trace_id(self) -> int:
            return (
                int.from_bytes(hashlib.blake2b(self.task.encode(), digest_size=16).digest(), "big")
                or 1
            )

    return TaskIds()
