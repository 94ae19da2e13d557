"""Learners: what turns finished rollouts into a better policy. Needs the extra `train` (torch, transformers)."""
