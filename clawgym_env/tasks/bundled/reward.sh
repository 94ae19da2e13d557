#!/usr/bin/env bash
# -I: nothing the agent planted (sitecustomize, PYTHONPATH, a json.py in the workspace) is imported.
exec python3 -I -S -B "${BASH_SOURCE[0]%/*}/check.py" "${BASH_SOURCE[0]%/*}/.."
