"""Spans for collectors of OpenTelemetry, received by a real HTTP server and read by OpenTelemetry's
own classes.
"""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from agentrl.errors import ConfigError
from agentrl.flow import Span
from agentrl.observe.profiler import Profiler
from agentrl.observe.span_export import SpanExport

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


@pytest.fixture
def collector(monkeypatch):
    """What a collector has received."""
    received = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.append((self.path, ExportTraceServiceRequest.FromString(body)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv(ENDPOINT, f"http://127.0.0.1:{server.server_port}")
    yield received
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_collector_gets_every_span_with_its_times_and_those_of_a_task_in_one_trace(collector):
    export = SpanExport.configured("frozen_lake")
    assert export is not None
    spans = [
        Span("engine", "generate", 1, "train-000001/0", 1.0, 3.5),
        Span("environments", "step", None, "train-000001/0", 3.5, 4.0),
        Span("engine", "generate", 0, "train-000001/1", 1.0, 2.0),
    ]
    export.send(spans, 1e9)
    export.close()
    assert {path for path, _ in collector} == {"/v1/traces"}
    resources = [resource for _, request in collector for resource in request.resource_spans]
    about = {
        (one.key, one.value.string_value)
        for resource in resources
        for one in resource.resource.attributes
    }
    assert {("service.name", "agentrl"), ("service.instance.id", "frozen_lake")} <= about
    got = [span for resource in resources for scope in resource.scope_spans for span in scope.spans]
    times = [(one.name, one.start_time_unix_nano, one.end_time_unix_nano) for one in got]
    assert sorted(times) == [
        ("generate", 1_000_000_001_000_000_000, 1_000_000_002_000_000_000),
        ("generate", 1_000_000_001_000_000_000, 1_000_000_003_500_000_000),
        ("step", 1_000_000_003_500_000_000, 1_000_000_004_000_000_000),
    ]
    traces = {one.trace_id for one in got}
    assert len(traces) == 2
    assert len({one.span_id for one in got}) == 3
    workers = [
        one.value.int_value
        for span in got
        for one in span.attributes
        if one.key == "agentrl.worker"
    ]
    assert sorted(workers) == [0, 1]


def test_nothing_is_exported_unless_the_environment_asks_for_it(monkeypatch):
    monkeypatch.delenv(ENDPOINT, raising=False)
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", raising=False)
    assert SpanExport.configured("run") is None


def test_without_its_packages_the_way_out_is_said_before_the_run_starts(monkeypatch, tmp_path):
    monkeypatch.setenv(ENDPOINT, "http://127.0.0.1:1")
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.trace", None)
    with (
        pytest.raises(ConfigError, match=r"agentrl-train\[otel\]"),
        Profiler(tmp_path, always=True),
    ):
        pass
