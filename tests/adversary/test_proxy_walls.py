"""An agent reaches its own rollout's model and nothing else of the proxy."""

from __future__ import annotations

import asyncio
import dataclasses

from arena import ScriptAgent, rollout, rollouts, task

from clawgym_env.harness import HarnessContext, HarnessExit
from clawgym_env.sandbox.base import Sandbox, SandboxBackend

ASK = r"""
cat > /tmp/ask.py <<'END'
import http.client, json, sys
def ask(path, method="POST", headers={}, whole=False):
    connection = http.client.HTTPConnection("127.0.0.1", 8080, timeout=10)
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "Hi"}]}) if method == "POST" else None
    connection.request(method, path, body, {"content-type": "application/json", **headers})
    response = connection.getresponse()
    return (response.status, response.read()) if whole else response.status
END
"""
OWN = (
    ASK
    + r"""
key="${1##*/}"
PYTHONPATH=/tmp python3 -c 'import sys; from ask import ask; print(ask(f"/r/{sys.argv[1]}/v1/chat/completions"))' "$key"
"""
)


def test_the_agents_own_key_answers(backend: SandboxBackend) -> None:
    assert rollout(backend, OWN, task()).harness_output.split() == ["200"]


class Gossip(ScriptAgent):
    """An agent that is told the key of another rollout, while that one lives."""

    def __init__(self, script: str, keys: list[str], together: asyncio.Barrier) -> None:
        super().__init__(script)
        self._keys, self._together = keys, together

    async def run(self, sandbox: Sandbox, context: HarnessContext) -> HarnessExit:
        own = context.base_url.rpartition("/")[2]
        self._keys.append(own)
        await self._together.wait()
        (other,) = set(self._keys) - {own}
        exit = await super().run(sandbox, dataclasses.replace(context, base_url=f"/{own} /{other}"))
        await self._together.wait()
        return exit


def test_the_key_of_another_rollout_is_unknown_to_the_agents_listener(backend: SandboxBackend) -> None:
    script = (
        ASK
        + r"""
for key in $1; do
    PYTHONPATH=/tmp python3 -c "from ask import ask; print(ask('/r$key/v1/chat/completions'))"
done
"""
    )
    keys: list[str] = []
    together = asyncio.Barrier(2)
    found = rollouts(backend, [Gossip(script, keys, together) for _ in range(2)], task())
    assert [one.harness_output.split() for one in found] == [["200", "404"]] * 2, found[0].error


def test_guessed_keys_are_unknown(backend: SandboxBackend) -> None:
    script = (
        ASK
        + r"""
PYTHONPATH=/tmp python3 - "${1##*/}" <<'END'
import sys
from ask import ask
key = sys.argv[1]
for guess in ("", "x", "0", "admin", key[:-1], key + "x", key.upper(), key[::-1], "..", "%2e%2e", key + "%00"):
    print(ask(f"/r/{guess}/v1/chat/completions"))
END
"""
    )
    assert set(rollout(backend, script, task()).harness_output.split()) == {"404"}


def test_admin_routes_are_not_there(backend: SandboxBackend) -> None:
    script = (
        ASK
        + r"""
PYTHONPATH=/tmp python3 - "${1##*/}" <<'END'
import sys
from ask import ask
key = sys.argv[1]
paths = ["/rollouts", f"/rollouts/{key}", f"/rollouts/{key}/settle", "/admin", "/health", "/metrics", "/docs", "/"]
paths += [f"/r/{key}/../..{path}" for path in paths] + [f"/r/{key}/%2e%2e/%2e%2e{path}" for path in paths]
for path in paths:
    for method in ("GET", "POST", "PUT", "DELETE"):
        status, body = ask(path, method, headers={"authorization": "Bearer x"}, whole=True)
        if (status, body) not in ((404, body), (405, body), (200, b"{}")): print(method, path, status, body)
END
"""
    )
    found = rollout(backend, script, task())
    assert (found.harness_exit_code, found.harness_output) == (0, ""), "a probe under a live key is told nothing"


def test_the_listener_is_the_only_open_port_inside(backend: SandboxBackend) -> None:
    script = r"""
cat /proc/net/tcp /proc/net/tcp6 2>/dev/null | awk '$4 == "0A" { print $2 }'
"""
    assert rollout(backend, script, task()).harness_output.split() == ["0100007F:1F90"]


def test_the_listener_is_gone_when_the_grader_runs(backend: SandboxBackend) -> None:
    probe = b"import socket; print(float(socket.socket().connect_ex(('127.0.0.1', 8080)) == 0))"
    for where in ("fresh", "same"):
        graded = task(probe, grade_in=where)
        found = rollout(backend, "true", graded)
        assert found.grade is not None, found.error
        assert found.grade.reward == 0.0
