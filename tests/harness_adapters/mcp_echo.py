"""The smallest MCP server, run inside a sandbox: one tool that says what it was asked, where, and its environment."""

import json
import os
import sys

SEARCH = {
    "name": "search",
    "description": "Search the documents.",
    "inputSchema": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
}


def main() -> None:
    """Answer requests on stdin until it ends."""
    for line in sys.stdin:
        message = json.loads(line)
        if "id" not in message:
            continue
        result: dict[str, object] = {}
        if message["method"] == "initialize":
            info = {"name": "echo", "version": "1"}
            version = message["params"]["protocolVersion"]
            result = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}
        elif message["method"] == "tools/list":
            result = {"tools": [SEARCH]}
        elif message["method"] == "tools/call":
            text = f"{message['params']['arguments']['query']} in {os.getcwd()} for {os.environ.get('READER')}"
            result = {"content": [{"type": "text", "text": text}]}
        sys.stdout.write(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
