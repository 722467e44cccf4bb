"""`agentrl view`: a page over the files of runs, and the data that it requests. Nothing here writes
to a run.
"""

import asyncio
import math
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from importlib.resources import files
from pathlib import Path
from time import monotonic
from typing import Annotated, Any

import uvicorn
from annotated_types import Ge
from fastapi import BackgroundTasks, Depends, FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentrl.errors import AgentRLError
from agentrl.observe.meanings import MEANINGS
from agentrl.remote.gate import RequestGate, idle_timeout
from agentrl.remote.http_server import HttpServer, check_reach
from agentrl.viewer.episode import EpisodeReader
from agentrl.viewer.episodes import KINDS, EpisodeIndex, EpisodeQuery, check_duckdb
from agentrl.viewer.evaluations import TaskQuery, evaluations
from agentrl.viewer.folders import RunFolder, find_runs
from agentrl.viewer.numbers import json_of
from agentrl.viewer.prometheus import exposition
from agentrl.viewer.timing import timing

_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
_POLICY = (
    # Styles and images within the page: of the pictures that environments draw, in frames without
    # scripts.
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:;"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "X-DNS-Prefetch-Control": "off",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_LOOK_SECONDS = 0.5


class PageServer(HttpServer):
    """Serves the page over the runs in `places`. `on_start` is called with its address.

    Raises:
        ConfigError: other machines could reach the server, and there is no token; a place is a
        file; DuckDB is missing.
    """

    def __init__(
        self,
        places: Sequence[Path],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        on_start: Callable[[str], None] = lambda url: None,
    ) -> None:
        check_reach(
            "host",
            host,
            token,
            "give a token (set the variable that --token-env names), forward the port with ssh -L",
        )
        super().__init__(
            uvicorn.Config(
                create_page_app(places, token),
                host=host,
                port=port,
                http=idle_timeout(60.0),
                access_log=False,
                log_level="warning",
                timeout_graceful_shutdown=1,  # streams of events do not end by themselves
            ),
            on_start,
        )


class _OpenRuns:
    """The runs that the server knows, each with its index, which is made when it is first asked
    for.

    There need not be any yet, nor the folders that they will be in.
    """

    def __init__(self, places: Sequence[Path]) -> None:
        self._places = places
        self._runs: dict[str, RunFolder] = {}
        self._open: dict[str, tuple[EpisodeIndex, EpisodeReader]] = {}
        self._lock, self._news_lock = threading.Lock(), threading.Lock()
        self._news: list[dict[str, Any]] = []
        self._asked = -math.inf
        find_runs(place for place in places if place.exists())  # which says what is wrong with them
        self.look()

    def look(self) -> list[RunFolder]:
        """All runs, new ones too, without those that have been deleted."""
        with self._lock:
            for name in [name for name, run in self._runs.items() if not run.exists]:
                del self._runs[name]
                self._open.pop(name, None)
            known = {run.path for run in self._runs.values()}
            for run in find_runs(place for place in self._places if place.is_dir()):
                if run.path not in known:
                    run.name = run.name if run.name not in self._runs else str(run.path)
                    self._runs[run.name] = run
            return list(self._runs.values())

    def statuses(self) -> list[dict[str, Any]]:
        """The status of each run, with the stamp of its metrics, which changes with them. However
        many pages want to know, the files are looked at only once in a while.
        """
        with self._news_lock:
            if monotonic() - self._asked >= _LOOK_SECONDS:
                self._news = [{**run.status(), "stamp": run.stamp} for run in self.look()]
                self._asked = monotonic()
            return self._news

    def run(self, name: str) -> RunFolder:
        """The run of this name."""
        run = self._runs.get(name)
        if run is None:
            raise HTTPException(404, f"there is no run {name!r}")
        return run

    def episodes(self, name: str) -> tuple[EpisodeIndex, EpisodeReader]:
        """The index and the reader of a run's episodes."""
        run = self.run(name)
        with self._lock:
            if name not in self._open:
                index = EpisodeIndex(run)
                self._open[name] = index, EpisodeReader(run, index)
            return self._open[name]


class _PageHeaders:
    """Middleware that adds headers: they forbid a browser everything that the page does not
    need.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_more(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        await self._app(scope, receive, send_more)


class _Json(JSONResponse):
    """JSON, also of values that JSON cannot represent."""

    def render(self, content: Any) -> bytes:
        return json_of(content)


def create_page_app(places: Sequence[Path], token: str | None = None) -> FastAPI:
    """The ASGI application: the page's files, which anyone may read, and the data, for which a
    token may be needed.
    """
    check_duckdb()
    runs = _OpenRuns(places)
    app = FastAPI(
        title="agentrl view",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        default_response_class=_Json,
    )
    open_paths = _add_page(app)
    _add_runs(app, runs)
    _add_episodes(app, runs)

    @app.exception_handler(AgentRLError)
    async def refuse(request: Request, error: AgentRLError) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, 400)

    app.add_middleware(_PageHeaders)
    app.add_middleware(
        RequestGate,
        token=token,
        max_body_bytes=1 << 16,
        request_seconds=10.0,
        open_paths=frozenset(open_paths),
    )
    return app


def _add_page(app: FastAPI) -> list[str]:
    """Add the page's files, and return their paths."""
    paths = ["/"]
    for file in files("agentrl.viewer").joinpath("page").iterdir():
        kind = _TYPES.get(Path(file.name).suffix)
        if kind is None:
            continue
        path = "/" if file.name == "index.html" else f"/{file.name}"
        paths.append(path)
        page = _static_page(file.read_bytes(), kind)
        app.add_api_route(path, page, methods=["GET"], include_in_schema=False)
    return paths


def _static_page(content: bytes, kind: str) -> Callable[[], Response]:
    # A function without parameters: FastAPI would let requests set any, also those with defaults.
    def page() -> Response:
        return Response(content, media_type=f"{kind}; charset=utf-8")

    return page


def _add_runs(app: FastAPI, runs: _OpenRuns) -> None:
    @app.get("/api/runs")
    def listed() -> Any:
        return _Json(runs.statuses())

    @app.get("/metrics")
    def prometheus() -> Response:
        return Response(exposition(runs.look()), media_type=CONTENT_TYPE_LATEST)

    @app.get("/api/meanings")
    def meanings() -> Any:
        return _Json(MEANINGS)

    @app.get("/api/metrics")
    def metrics(
        run: str, later: BackgroundTasks, after: Annotated[int, Ge(0)] = 0, generation: int = 0
    ) -> Any:
        folder = runs.run(run)
        if after == 0:  # who looks at curves will look at episodes
            later.add_task(_refresh, runs, run)
        rows = folder.metrics()
        begin = after if generation == folder.generation else 0
        found = {"generation": folder.generation, "from": begin, "rows": rows[begin:]}
        return _Json(found, background=later)

    @app.get("/api/config")
    def config(run: str, number: int | None = None) -> Any:
        folder = runs.run(run)
        origins = folder.origins() if number is None else {}
        return _Json(
            {"settings": folder.settings(number), "origins": origins, "changes": folder.changes()}
        )

    @app.get("/api/events")
    async def events() -> StreamingResponse:
        return StreamingResponse(_events(runs), media_type="text/event-stream")


def _refresh(runs: _OpenRuns, name: str) -> None:
    runs.episodes(name)[0].refresh()


def _add_episodes(app: FastAPI, runs: _OpenRuns) -> None:
    @app.get("/api/episodes")
    def episodes(run: str, query: Annotated[EpisodeQuery, Depends()]) -> Any:
        return _Json(runs.episodes(run)[0].page(query))

    @app.get("/api/choices")
    def choices(run: str, evaluation: str = "") -> Any:
        return _Json(runs.episodes(run)[0].choices(evaluation))

    @app.get("/api/evaluations")
    def evaluated(run: str, query: Annotated[TaskQuery, Depends()]) -> Any:
        names = {name: list(files) for name, files in runs.run(run).evaluations().items()}
        return _Json(evaluations(runs.episodes(run)[0], names, query))

    @app.get("/api/tools")
    def tools(
        run: str, first: int | None = None, last: int | None = None, evaluation: str = ""
    ) -> Any:
        return _Json(runs.episodes(run)[0].tools(first, last, evaluation))

    @app.get("/api/episode")
    def episode(
        run: str,
        id: str,  # noqa: A002  a query's name
        agent: str = "",
        step: int | None = None,
    ) -> Any:
        return _Json(runs.episodes(run)[1].episode(id, agent, step, pictures=True))

    @app.get("/api/group")
    def group(run: str, task: str) -> Any:
        return _Json(runs.episodes(run)[1].group(task))

    @app.get("/api/time")
    def time(run: str, first: int | None = None, last: int | None = None) -> Any:
        index, reader = runs.episodes(run)
        return _Json(
            timing(
                runs.run(run),
                index,
                reader,
                None if first is None or last is None else (first, last),
            )
        )

    @app.get("/api/gantt")
    def gantt(run: str, step: int) -> Any:
        index, reader = runs.episodes(run)
        kinds = {kind: reader.turns_of_step(step, kind, staleness=True) for kind in KINDS}
        fates = index.fates(step)
        played = [
            {**one, "fate": fates.get(one["id"], "")} for found in kinds.values() for one in found
        ]
        return _Json(sorted(played, key=lambda one: one["started"]))


async def _events(runs: _OpenRuns) -> AsyncIterator[bytes]:
    """An event for each change of a run's status or metrics, one for each run that is gone, and a
    comment now and then, which shows a lost client.
    """
    said: dict[str, Any] = {}
    quiet = 0.0
    while True:
        now = {news["name"]: news for news in await asyncio.to_thread(runs.statuses)}
        changed = [news for name, news in now.items() if said.get(name) != news]
        gone = [{"name": name, "gone": True} for name in said if name not in now]
        said = now
        for news in (*changed, *gone):
            yield b"data: " + json_of(news) + b"\n\n"
        quiet = 0.0 if changed or gone else quiet + _LOOK_SECONDS
        if quiet >= 15:
            quiet = 0.0
            yield b": still here\n\n"
        await asyncio.sleep(_LOOK_SECONDS)
