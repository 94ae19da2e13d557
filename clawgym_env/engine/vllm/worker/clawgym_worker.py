"""Inside a vLLM server: loads weights from a folder as `reload_weights` does, without two of its traps.

Mixed into vLLM's worker by `--worker-extension-cls clawgym_worker.WeightLoading`, which `clawgym serve` says; imports
nothing of this project. Invariants: a folder that cannot be read changes nothing, and after a load the output layer is
the new one, too.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


class WeightLoading:
    """Methods of a worker, called by `/collective_rpc`."""

    model_runner: Any
    reload_weights: Any

    def clawgym_ready(self) -> str:
        """Say that this is here."""
        return "clawgym"

    def clawgym_load_weights(self, folder: str) -> None:
        """Load every tensor of a folder's safetensors.

        Raises:
            FileNotFoundError: there are none.
        """
        tensors = _read(Path(folder))  # whole, before the old weights are touched
        self.reload_weights(weights_iterator=iter(tensors.items()))
        for module in self.model_runner.get_model().modules():
            # vLLM 0.32 on a CPU computes the output layer from a packed copy, which a reload leaves as it was where
            # the layer is tied to the embedding (SmolLM2: log-probabilities of the old weights' output layer).
            if hasattr(module, "cpu_linear") and hasattr(module, "num_embeddings"):
                module.quant_method.process_weights_after_loading(module)


def _read(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"Expected safetensors in {folder}, got none.")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}
