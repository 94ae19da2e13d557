"""The engine over vLLM servers: one or several replicas of a policy, sampled over HTTP and updated from the trainer."""

from clawgym_env.engine.vllm.engine import VllmEngine as VllmEngine
from clawgym_env.engine.vllm.settings import VllmSettings as VllmSettings
