"""What `clawgym doctor --engine` says of a vLLM server."""

from __future__ import annotations

from pathlib import Path

from fake_vllm import FakeVllm, serving
from model_families import FAMILIES, write_folder

from clawgym_env.doctor.equipment import engine


def test_a_server_that_is_flagged_right_is_ok_and_one_that_is_not_has_its_flag_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "policy", FAMILIES["qwen3"])
    with serving(FakeVllm(str(folder), lambda body: 500)) as server:
        (found,) = engine(f"vllm:{server.url}", tmp_path)
        assert (found.status, found.found) == ("ok", "answers; 640 tokens of prompt and reply")
        for fault, flag in (("processed", "--logprobs-mode processed_logprobs"), ("scale_out", "--enable-scale-out")):
            setattr(server, fault, False)
            (found,) = engine(f"vllm:{server.url}", tmp_path)
            assert found.status == "problem"
            assert flag in found.found + found.fix
