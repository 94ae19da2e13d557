"""A policy: the weights that answer, with the tokenizer and renderer that turn conversations into their token ids.

Made by `load_policy` (or by `learners.tiny` and `learners.smollm2`, which build the two embedded ones), shared by the
engine that samples and the learner that trains. Invariant: a saved policy is a plain Hugging Face folder, complete or
not there at all.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast
from weakref import ReferenceType

from clawgym_env import chat_template
from clawgym_env.errors import EngineError, EngineNameError, PolicyNotBuilt
from clawgym_env.extras import require_package

if TYPE_CHECKING:
    from renderers.base import Renderer
    from transformers import PreTrainedModel

    from clawgym_env.engine.base import Engine
    from clawgym_env.tokenizer import TextTokenizer

BUILDERS: Mapping[str, str] = MappingProxyType({"tiny": "learners.tiny:build", "smollm2": "learners.smollm2:build"})
"""Policies this project builds itself: name to `build(folder: Path) -> None`."""
BYTES = "bytes"
"""A policy's text without a policy: the tokenizer of 256 bytes with ChatML, which needs no file."""

_NOTE = "clawgym.json"
"""Beside the weights: what a Hugging Face folder has no word for (name, renderer, window)."""


@dataclass(slots=True, eq=False)
class Policy:
    """One language model under training or in use."""

    module: PreTrainedModel
    """A transformers causal language model; a PEFT wrapper around one is fine."""
    tokenizer: TextTokenizer
    renderer: Renderer
    name: str
    path: Path | None
    """The folder it came from; None when it was made in memory."""
    context_length: int
    """Tokens of prompt and reply together."""
    version: int = 0
    """Counts weight updates since it was loaded; a learner that resumes sets it to where it was."""
    renderer_kind: str | None = None
    """What `load_policy(renderer=...)` makes this renderer from; None where `renderer` was made by hand."""
    epoch: int = 0
    """Counts every change of the weights and is never set back: what cached keys and values are dated by."""
    sampler: ReferenceType[Engine] | None = field(default=None, repr=False)
    """The open engine, of which a policy has one at most: an update through another would not be seen."""

    def claim(self, engine: Engine) -> None:
        """Make `engine` the one that samples from this policy.

        Raises:
            EngineError: another one is open.
        """
        self.check_sole(engine)
        self.sampler = ReferenceType(engine)

    def check_sole(self, engine: Engine) -> None:
        """Check that no other engine samples from this policy.

        Raises:
            EngineError: another one is open.
        """
        other = None if self.sampler is None else self.sampler()
        if other is not None and other is not engine:
            raise EngineError(
                f"Expected one open engine over the policy {self.name!r}, got a second: it would not see the updates "
                "of the first. Share the first (make the environment with engine=learner.engine() instead of "
                "policy=learner.policy, or the learner with engine=...), or close it before."
            )

    def release(self, engine: Engine) -> None:
        """Let another engine have it. Idempotent."""
        if self.sampler is not None and self.sampler() is engine:
            self.sampler = None


@dataclass(frozen=True, slots=True)
class PolicyText:
    """How a policy reads and writes: all of it but the weights."""

    name: str
    tokenizer: TextTokenizer
    renderer: Renderer
    renderer_kind: str | None = None
    """As of `Policy`."""


def load_policy(
    spec: str | Path,
    *,
    cache: Path,
    context_length: int | None = None,
    device: str = "cpu",
    dtype: str = "float32",
    renderer: str | None = None,
) -> Policy:
    """Load a policy by name or from a Hugging Face folder.

    Args:
        spec: "tiny", "smollm2" or a folder with config.json, safetensors and tokenizer.json.
        cache: where built policies are kept.
        context_length: overrides the model's window. Beyond what the model was trained for, answers get worse.
        dtype: of the parameters. Log-probabilities on a CPU are exact in float32 only.
        renderer: "chatml" or a family name of the `renderers` library; by default what the folder says or is.

    Raises:
        PolicyNotBuilt: with the command that builds a policy of ours.
        EngineError: no such policy or folder, or no renderer that can extend its conversations.
    """
    if spec == BYTES:
        raise EngineError(f"Expected a policy with weights, got {BYTES!r}, which is a tokenizer only.")
    text = load_text(spec, cache=cache, renderer=renderer)
    require_package("torch", "transformers")
    import torch
    from transformers import AutoModelForCausalLM

    folder = policy_folder(spec, cache)
    with _no_progress_bars():
        module: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), local_files_only=True)
    window = context_length or _number(_read_json(folder / _NOTE), "context_length")
    return Policy(
        module=module.to(device).eval(),
        tokenizer=text.tokenizer,
        renderer=text.renderer,
        name=text.name,
        path=folder,
        context_length=window or int(module.config.max_position_embeddings),
        renderer_kind=text.renderer_kind,
    )


def load_text(spec: str | Path, *, cache: Path, renderer: str | None = None) -> PolicyText:
    """Load how a policy reads and writes, without its weights (and without torch); arguments as of `load_policy`.

    Args:
        spec: may be "bytes" too, which needs no file.

    Raises:
        PolicyNotBuilt, EngineError: as `load_policy`.
    """
    if spec == BYTES:
        return _bytes_text()
    folder = policy_folder(spec, cache)
    if spec in BUILDERS and not (folder / _NOTE).is_file():
        raise PolicyNotBuilt(str(spec))
    if not (folder / "config.json").is_file():
        raise EngineNameError(
            f"Expected a policy out of {', '.join(BUILDERS)} or a Hugging Face folder with a config.json, "
            f"got {str(spec)!r}."
        )
    from clawgym_env.rendering import make_renderer, renderer_kind
    from clawgym_env.tokenizer import TextTokenizer

    note = _read_json(folder / _NOTE)
    config = _read_json(folder / "config.json")
    tokenizer = TextTokenizer.from_folder(folder, name_or_path=_text(config, "_name_or_path"))
    kind = renderer_kind(tokenizer, renderer or _text(note, "renderer") or _text(config, "model_type") or "auto")
    return PolicyText(_text(note, "name") or folder.name, tokenizer, make_renderer(tokenizer, kind), kind)


def _bytes_text() -> PolicyText:
    from clawgym_env.rendering import ChatMLRenderer
    from clawgym_env.tokenizer import byte_tokenizer

    tokenizer = byte_tokenizer()
    return PolicyText(BYTES, tokenizer, ChatMLRenderer(tokenizer), "chatml")


def policy_folder(spec: str | Path, cache: Path) -> Path:
    """Return where a policy lies, built or not."""
    return cache / "policies" / str(spec) if spec in BUILDERS else Path(spec).expanduser()


def build_policy(name: str, cache: Path) -> Path:
    """Build one of our own policies into the cache, replacing an older one, and return its folder.

    Raises:
        EngineError: the name is not one of `BUILDERS`.
    """
    if name not in BUILDERS:
        raise EngineNameError(
            f"Expected a policy out of {', '.join(BUILDERS)}, got {name!r}. Other folders need no build."
        )
    module, _, attribute = BUILDERS[name].partition(":")
    build = cast("Callable[[Path], None]", getattr(import_module(module), attribute))
    folder = policy_folder(name, cache)
    build(folder)
    return folder


def save_policy(policy: Policy, folder: str | Path) -> Path:
    """Write weights (safetensors), config, tokenizer and chat template so that `load_policy` and others read them.

    An existing folder is replaced at once, after the new one is complete. A PEFT wrapper is merged in the copy only.
    """
    folder = Path(folder)
    with _replacing(folder) as fresh:
        _save_weights(policy, fresh)
        policy.tokenizer.save(fresh)
        kind = _renderer_kind(policy)
        template = chat_template.CHATML if kind == "chatml" else _own_template(policy)
        if template is not None:
            (fresh / chat_template.FILE).write_text(template, encoding="utf-8")
        note = {"name": policy.name, "renderer": kind, "context_length": policy.context_length}
        (fresh / _NOTE).write_text(json.dumps(note, indent=2) + "\n", encoding="utf-8")
    return folder


def save_weights(policy: Policy, folder: Path) -> None:
    """Write weights and config alone, as of `save_policy`, for a server that has the tokenizer already."""
    with _replacing(folder) as fresh:
        _save_weights(policy, fresh)


def merged_module(policy: Policy) -> PreTrainedModel:
    """Return the policy's module without adapters: merged in a copy where it has some, else the module itself."""
    module: Any = policy.module
    if hasattr(module, "merge_and_unload"):
        from copy import deepcopy

        module = deepcopy(module).merge_and_unload()
    return cast("PreTrainedModel", module)


def _save_weights(policy: Policy, folder: Path) -> None:
    module: Any = merged_module(policy)
    with _no_progress_bars():
        module.save_pretrained(folder, safe_serialization=True)


def _renderer_kind(policy: Policy) -> str | None:
    from clawgym_env.rendering import ChatMLRenderer

    return "chatml" if isinstance(policy.renderer, ChatMLRenderer) else policy.renderer_kind


def _own_template(policy: Policy) -> str | None:
    return None if policy.path is None else chat_template.folder_template(policy.path)


@contextmanager
def _replacing(folder: Path) -> Iterator[Path]:
    """Give a fresh folder beside `folder`; when the body ends well it takes its place by a rename."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        fresh = scratch / "new"
        fresh.mkdir()
        yield fresh
        if folder.exists():
            os.rename(folder, scratch / "old")
        os.rename(fresh, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    from transformers.utils import logging

    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _read_json(file: Path) -> Mapping[str, object]:
    if not file.is_file():
        return {}
    value = json.loads(file.read_text(encoding="utf-8"))
    return value if isinstance(value, dict) else {}


def _text(values: Mapping[str, object], key: str) -> str | None:
    value = values.get(key)
    return value if isinstance(value, str) and value else None


def _number(values: Mapping[str, object], key: str) -> int | None:
    value = values.get(key)
    return value if isinstance(value, int) else None
