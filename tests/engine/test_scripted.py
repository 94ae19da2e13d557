"""The scripted engine answers from its script and keeps the engine contract."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from clawgym_env.engine.base import Engine, Generation, SamplingParams
from clawgym_env.engine.scripted import ScriptedEngine, ScriptedReply, scripted_from_file, tool_call
from clawgym_env.errors import EngineError
from clawgym_env.messages import Message
from clawgym_env.rendering import message_dicts, parse_reply


def prompt(engine: Engine, *texts: str) -> list[int]:
    """Render user and assistant texts in turn, ready for the next reply."""
    roles = ("user", "assistant")
    turns = [Message(roles[i % 2], text) for i, text in enumerate(texts)]  # type: ignore[arg-type]
    return engine.renderer.render_ids(message_dicts(turns), add_generation_prompt=True)


def ask(engine: Engine, *texts: str, max_tokens: int = 1024) -> Generation:
    return asyncio.run(engine.generate(prompt(engine, *texts), SamplingParams(max_tokens=max_tokens)))


def said(engine: Engine, *texts: str) -> str:
    return parse_reply(engine.renderer, ask(engine, *texts).token_ids.tolist()).content


def test_it_is_an_engine() -> None:
    assert isinstance(ScriptedEngine(["hi"]), Engine)


def test_a_function_sees_the_prompts_text_and_the_number_of_turns_so_far() -> None:
    seen: list[tuple[str, int]] = []

    def reply(text: str, turn: int) -> str:
        seen.append((text, turn))
        return "yes"

    engine = ScriptedEngine(reply)
    assert said(engine, "one") == "yes"
    assert said(engine, "one", "yes", "two") == "yes"
    assert [turn for _, turn in seen] == [0, 1]
    assert "two" in seen[1][0]


def test_a_list_is_read_turn_by_turn_and_its_last_reply_repeats() -> None:
    engine = ScriptedEngine(["a", "b"])
    assert [said(engine, "x"), said(engine, "x", "a", "y"), said(engine, "x", "a", "y", "b", "z")] == ["a", "b", "b"]


def test_a_turn_ends_with_the_stop_id_and_has_a_logprob_per_id() -> None:
    engine = ScriptedEngine(["hello"])
    generation = ask(engine, "x")
    assert generation.finish_reason == "stop"
    assert generation.token_ids[-1] == engine.renderer.get_stop_token_ids()[0]
    assert generation.token_ids.dtype == np.int32
    assert generation.logprobs.dtype == np.float32
    assert generation.logprobs.shape == generation.token_ids.shape
    assert np.all(generation.logprobs < 0.0)


def test_a_long_reply_is_cut_at_the_budget() -> None:
    generation = ask(ScriptedEngine(["hello"]), "x", max_tokens=3)
    assert (len(generation.token_ids), generation.finish_reason) == (3, "length")


def test_the_window_bounds_prompt_and_reply_together() -> None:
    engine = ScriptedEngine(["hello"])
    length = len(prompt(engine, "x"))
    assert len(ask(ScriptedEngine(["hello"], context_length=length + 2), "x").token_ids) == 2
    with pytest.raises(EngineError, match="fewer than"):
        ask(ScriptedEngine(["hello"], context_length=length), "x")


def test_a_tool_call_is_sampled_as_the_renderer_reads_it() -> None:
    engine = ScriptedEngine(["look\n" + tool_call("bash", command="echo é")])
    reply = parse_reply(engine.renderer, ask(engine, "x").token_ids.tolist())
    assert reply.content == "look"
    assert [(name, json.loads(arguments)) for name, arguments in reply.tool_calls] == [("bash", {"command": "echo é"})]
    assert reply.malformed == ()


def test_an_update_counts_the_version_that_later_tokens_carry() -> None:
    engine = ScriptedEngine(["hello"])
    applied: list[int] = []
    assert engine.update_weights(lambda: applied.append(1)) == 1
    assert applied == [1]
    (span,) = ask(engine, "x").policy_versions
    assert (span.version, span.start, span.end) == (1, 0, 6)


def test_a_paused_engine_answers_after_resume() -> None:
    async def run() -> Generation:
        engine = ScriptedEngine(["hello"])
        await engine.pause()
        task = asyncio.create_task(engine.generate(prompt(engine, "x"), SamplingParams()))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not task.done()
        await engine.resume()
        return await task

    assert asyncio.run(run()).finish_reason == "stop"


def test_a_scripted_error_is_an_engine_error() -> None:
    with pytest.raises(EngineError, match="out of memory"):
        ask(ScriptedEngine([ScriptedReply("", error="out of memory")]), "x")


def test_a_script_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "script.json"
    path.write_text(json.dumps([{"text": "look", "tool": "bash", "arguments": {"command": "ls"}}, "done"]))
    engine = scripted_from_file(path)
    first = parse_reply(engine.renderer, ask(engine, "x").token_ids.tolist())
    assert (first.content, [name for name, _ in first.tool_calls]) == ("look", ["bash"])
    assert said(engine, "x", "y", "z") == "done"


@pytest.mark.parametrize("text", ["", "{}", "[]", "[3]", '[{"tol": "x"}]', '[{"tool": 3}]'])
def test_a_bad_script_names_the_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "script.json"
    path.write_text(text)
    with pytest.raises(EngineError, match=r"script\.json"):
        scripted_from_file(path)
