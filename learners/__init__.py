"""Learners: what turns finished rollouts into a better policy. Needs the extra `train` (torch, transformers)."""

from clawgym_env.extras import require_package

require_package("torch")
