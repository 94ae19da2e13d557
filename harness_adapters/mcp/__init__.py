"""Bundled MCP servers: tools a task can give to every harness that speaks MCP."""
