"""Adapter of mini-swe-agent (PyPI `mini-swe-agent`), on the chat dialect through litellm, without streaming.

One tool, bash; append-only, with one exception: a reply it rejects (no tool call, an unknown tool, bad arguments, cut
at its limit) is left out of the next request, which carries the complaint alone. Such a reply is a dead leaf and the
run goes on beside it; three in a row end the run. Exit codes are 0 whatever happened; the trajectory file knows.
"""

from __future__ import annotations

import json
from pathlib import Path

from clawgym_env.errors import SandboxError
from clawgym_env.harness import HarnessContext, HarnessExit
from clawgym_env.messages import Dialect, Json
from clawgym_env.sandbox.base import Sandbox
from harness_adapters.launch import HOME
from harness_adapters.product import InstalledHarness
from harness_adapters.pypi import SITE, PypiProduct

PRODUCT = PypiProduct(
    name="mini-swe-agent",
    version="2.4.6",
    lock=Path(__file__).with_name("mini_swe_lock.txt"),
    entry="minisweagent.run.mini.app",
    preload=("minisweagent.models.litellm_model",),
)
STATE = f"{HOME}/.config/mini-swe-agent"
CONFIG = f"{STATE}/run.yaml"
TRAJECTORY = f"{STATE}/trajectory.json"
DEFAULTS = f"{PRODUCT.root}/{SITE}/minisweagent/config/mini.yaml"
"""By its whole path: of a bare name it would take a task's own file first."""
ENVIRONMENT = {
    "MSWEA_CONFIGURED": "true",  # else it asks for a model and a key
    "MSWEA_SILENT_STARTUP": "1",
    "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "4",  # 4 s and more between them, three requests each
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else litellm asks GitHub for prices
}


class MiniSweHarness(InstalledHarness):
    """mini-swe-agent, headless."""

    product = PRODUCT
    name = PRODUCT.name
    version = PRODUCT.version
    dialect: Dialect = "chat"
    memory_mb = 768

    async def run(self, sandbox: Sandbox, context: HarnessContext) -> HarnessExit:
        await sandbox.write_file(CONFIG, yaml_text(config(context)).encode())
        argv = [*PRODUCT.argv, "-c", DEFAULTS, "-c", CONFIG, "-o", TRAJECTORY]
        done = await sandbox.exec(argv, env=ENVIRONMENT, cwd=context.workdir)
        try:
            response = final_answer(await sandbox.read_file(TRAJECTORY))
        except (OSError, SandboxError):
            response = ""
        return HarnessExit(done.exit_code, done.stdout, done.stderr, response, done.timed_out)


def config(context: HarnessContext) -> dict[str, Json]:
    """Return what is added to the product's own defaults. Address and key stay out of the agent's environment."""
    connection: dict[str, Json] = {
        "api_base": f"{context.base_url}/v1",
        "api_key": context.api_key,
        "timeout": context.wall_clock_s,
    }
    return {
        "run": {"task": context.instruction},
        "agent": {"mode": "yolo", "confirm_exit": False, "cost_limit": 0},
        "model": {
            "model_name": f"openai/{context.model}",
            "cost_tracking": "ignore_errors",
            "model_kwargs": connection,
        },
    }


def yaml_text(value: Json) -> str:
    """Return JSON that a YAML reader takes too: no pairs of surrogates, no raw control characters. Keys stay short."""
    text = json.dumps(value, ensure_ascii=False)
    return "".join(c if c.isascii() and c.isprintable() else f"\\U{ord(c):08x}" for c in text)


def final_answer(trajectory: bytes) -> str:
    """Return what was submitted, else the text beside the submission; empty where the run ended otherwise."""
    try:
        record = json.loads(trajectory)
        info, messages = record["info"], record["messages"]
        if info["exit_status"] != "Submitted":
            return ""
        said = [message.get("content") or "" for message in messages if message["role"] == "assistant"]
        return str(info["submission"] or (said[-1] if said else "")).strip()
    except (ValueError, LookupError, TypeError, AttributeError):
        return ""
