"""HTTP to the servers that users bring (judges, OpenEnv): httpx over the connections of aiohttp.

httpx is the interface: callers may pass an `httpx.AsyncClient` of their own, for example one with
an `httpx.ASGITransport` or with authentication. The connections are aiohttp's, because with 64
requests in flight httpx's own pool takes nine times the CPU (2.9 ms a request, where this takes
0.3), and it loses a connection when a request is cancelled at the wrong moment
(encode/httpcore#1093). Engines (agentrl/engines/openai.py) use aiohttp directly, which takes half
of that, and WebSockets are not a part of httpx.
"""

from functools import partial
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
import httpx
from httpx_aiohttp import AiohttpTransport, HttpxAiohttpClient


def proxy_note(url: str, *, used: bool) -> str:
    """The note on the environment's proxies for an error of a connection to `url`; "" if none
    applies.

    `used`: whether the connection goes through them, as httpx does; WebSockets here and the
    engine's requests do not.
    """
    parts = urlsplit(url)
    named = next((scheme for scheme in (parts.scheme, "all") if scheme in getproxies()), None)
    if named is None or proxy_bypass(parts.netloc):
        return ""
    named = f"{named.upper()}_PROXY"
    if used:
        return (
            f"; {named} is set, so its proxy was asked: a server that is reached without it belongs"
            " in NO_PROXY"
        )
    return f"; {named} is set, and is not used here: the server has to be reached without a proxy"


def http_client(*, trust_env: bool = True) -> httpx.AsyncClient:
    """A client without limits of its own: callers set a deadline for each request, and how many are
    in flight.

    It keeps no cookies and follows no redirects. With `trust_env` it uses the proxies of the
    environment (`HTTPS_PROXY` and so on). Enter it in the event loop that uses it. Whatever goes
    wrong on the way is an `httpx.TransportError`.
    """
    no_cookies = CookieJar(DefaultCookiePolicy(allowed_domains=()))
    return _Client(timeout=None, cookies=no_cookies, trust_env=trust_env)


class _Client(HttpxAiohttpClient):
    """An httpx client whose transports, those of proxies included, are `_Transport`s."""

    def _init_transport(self, *args: Any, **options: Any) -> httpx.AsyncBaseTransport:
        return _Transport(super()._init_transport(*args, **options))

    def _init_proxy_transport(self, *args: Any, **options: Any) -> httpx.AsyncBaseTransport:
        return _Transport(super()._init_proxy_transport(*args, **options))


class _Transport(httpx.AsyncBaseTransport):
    """The transport of httpx-aiohttp, with unlimited connections and every error of aiohttp as one
    of httpx.
    """

    def __init__(self, transport: httpx.AsyncBaseTransport) -> None:
        assert isinstance(transport, AiohttpTransport)
        transport.client = partial(_session, transport)
        self._transport = transport

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request."""
        try:
            return await self._transport.handle_async_request(request)
        except aiohttp.ClientError as error:
            # The package translates all others; this is an answer that is no HTTP.
            raise httpx.RemoteProtocolError(str(error), request=request) from error

    async def aclose(self) -> None:
        """Close all connections."""
        await self._transport.aclose()


def _session(transport: AiohttpTransport) -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(limit=0, ssl=transport.ssl_context)
    return aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())
