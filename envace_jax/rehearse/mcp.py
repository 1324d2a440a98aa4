"""Real tools through the official MCP client (the `mcp` extra), over stdio or HTTP, as a blocking environment.

The session lives in an event loop in a thread of its own. A server that dies or does not answer makes a call an error
result, and never ends the conversation; size is bounded by `Guarded`, around it.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import AsyncExitStack
from typing import Any

from envace_jax.errors import ConfigError, EndpointError

MAX_PAGES = 50  # of the list of tools


class MCPEnvironment:
    """The tools of one MCP server. Use it as a context, or close it.

    Args:
        command: of a server that speaks over stdio; url: of one that speaks HTTP. One of the two.
        timeout_s: for connecting, and for each call.

    tools: OpenAI function schemas. read_only: names of the tools that say they change nothing.
    Raises EndpointError when the server cannot be reached, ConfigError without the extra.
    """

    def __init__(self, *, command: str | None = None, url: str | None = None, timeout_s: float = 60.0):
        if (command is None) == (url is None):
            raise ConfigError("give --mcp COMMAND or --mcp-url URL, not both")
        try:
            import mcp  # noqa: F401
        except ImportError as error:
            raise ConfigError("MCP needs the official client: pip install 'envace-jax[mcp]'") from error
        self._command, self._url, self._timeout_s = command, url, timeout_s
        self._where = command if command is not None else url
        self.tools: list[dict[str, Any]] = []
        self.read_only: set[str] = set()
        self._loop = asyncio.new_event_loop()
        self._ready: Future[None] = Future()
        self._over: asyncio.Event | None = None
        self._session: Any = None
        self._thread = threading.Thread(target=self._run, name="mcp", daemon=True)
        self._thread.start()
        try:
            self._ready.result(timeout_s)
        except Exception as error:
            self.close()
            said = " ".join(str(_innermost(error)).split())[:300] or f"no answer within {timeout_s:g} s"
            raise EndpointError(f"MCP server {self._where}: {said}") from error

    def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """The result of one call: its structured content, else its text (as JSON where it is JSON)."""
        if not self._thread.is_alive():
            return {"error": f"the MCP server {self._where} is gone"}
        future = asyncio.run_coroutine_threadsafe(self._session.call_tool(name, dict(arguments)), self._loop)
        try:
            return read_result(future.result(self._timeout_s).model_dump(by_alias=True, mode="json"))
        except TimeoutError:
            future.cancel()
            return {"error": f"{name} gave no answer within {self._timeout_s:g} s"}
        except Exception as error:  # of the protocol, the transport, or the server's process
            said = " ".join(str(_innermost(error)).split())[:300] or type(error).__name__
            return {"error": f"{name} failed: {said}"}

    def close(self) -> None:
        """End the session, and with it a server that was started for it."""
        if self._over is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._over.set)
            self._thread.join(10)

    def __enter__(self) -> MCPEnvironment:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # In the loop's thread.

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:  # told to who waits; a session that breaks later shows in `call`
            if not self._ready.done():
                self._ready.set_exception(error)

    async def _serve(self) -> None:
        from mcp import ClientSession

        self._over = asyncio.Event()
        async with AsyncExitStack() as stack:
            read, write, *_ = await stack.enter_async_context(self._transport())
            self._session = await stack.enter_async_context(ClientSession(read, write))
            await self._session.initialize()
            cursor = None
            for _ in range(MAX_PAGES):
                params = {"params": _page(cursor)} if cursor else {}
                page = (await self._session.list_tools(**params)).model_dump(by_alias=True, mode="json")
                for tool in page["tools"]:
                    self._add(tool)
                cursor = page.get("nextCursor")
                if not cursor:
                    break
            self._ready.set_result(None)
            await self._over.wait()

    def _transport(self) -> Any:
        if self._command is not None:
            from mcp import StdioServerParameters
            from mcp.client.stdio import stdio_client

            program, *arguments = shlex.split(self._command)
            return stdio_client(StdioServerParameters(command=program, args=arguments))
        from mcp.client import streamable_http

        # The function was renamed in version 2.
        connect = getattr(streamable_http, "streamable_http_client", None) or streamable_http.streamablehttp_client
        return connect(self._url)

    def _add(self, tool: Mapping[str, Any]) -> None:
        function = {
            "name": tool["name"],
            "description": tool.get("description") or "",
            "parameters": tool["inputSchema"],
        }
        self.tools.append({"type": "function", "function": function})
        if (tool.get("annotations") or {}).get("readOnlyHint"):
            self.read_only.add(tool["name"])


def read_result(result: Mapping[str, Any]) -> Any:
    """The JSON value of an MCP tool result: structured content, or the text of its parts; an error says so."""
    parts = [part.get("text") or f"[{part.get('type')}]" for part in result.get("content") or ()]
    text = "\n".join(parts)
    if result.get("isError"):
        return {"error": text or "the tool failed"}
    if result.get("structuredContent") is not None:
        return result["structuredContent"]
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return {"result": text}


def _page(cursor: str) -> Any:
    from mcp.types import PaginatedRequestParams

    return PaginatedRequestParams(cursor=cursor)


def _innermost(error: BaseException) -> BaseException:
    """The first error of nested groups, which is the one that says something."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
