"""A folder for the server's PYTHONPATH: what runs inside vLLM, whose environment need not have this project."""
