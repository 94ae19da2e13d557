"""The conformance suite: does every token a real harness sends and gets stay the token the engine saw?

`run_fidelity` plays scripted scenarios through an installed harness, the real sandbox and the real proxy, with a
policy's own tokenizer and renderer, and compares what the engine was asked and answered with the captured tree. The
command is `clawgym fidelity`.
"""

from clawgym_env.fidelity.report import Divergence, FidelityReport, ScenarioResult
from clawgym_env.fidelity.run import run_fidelity
from clawgym_env.fidelity.scenarios import SCENARIOS
from clawgym_env.policy import PolicyText

__all__ = ["SCENARIOS", "Divergence", "FidelityReport", "PolicyText", "ScenarioResult", "run_fidelity"]
