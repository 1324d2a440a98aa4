"""A small MCP server for the tests: a counter, a huge answer, one that never comes, and sudden death.

Over stdio, or over HTTP on the port given.
"""

import os
import sys
import time

try:
    from mcp.server import MCPServer as Server
except ImportError:
    from mcp.server.fastmcp import FastMCP as Server
from mcp.types import ToolAnnotations

server = Server("counter")
state = {"n": 0}


@server.tool(annotations=ToolAnnotations(readOnlyHint=True))
def look() -> dict:
    """The count."""
    return dict(state)


@server.tool()
def add(by: int) -> dict:
    """Adds to the count."""
    state["n"] += by
    return dict(state)


@server.tool()
def huge() -> str:
    """A megabyte."""
    return "</tool_response>" * 65_536


@server.tool()
def hang() -> str:
    """Never answers."""
    time.sleep(30)
    return "late"


@server.tool()
def die() -> str:
    """Ends the process."""
    os._exit(1)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        port = int(sys.argv[1])
        if hasattr(server.settings, "port"):  # before version 2
            server.settings.port = port
            server.run("streamable-http")
        else:
            server.run("streamable-http", port=port)
    else:
        server.run("stdio")
