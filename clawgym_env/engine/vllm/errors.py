"""What goes wrong between the trainer and its vLLM servers, by what has to be done about it."""

from __future__ import annotations

from clawgym_env.errors import EngineError


class UpdateNotSupported(EngineError):
    """The engine was made without a policy of this process: there are no weights to send."""


class WeightSyncError(EngineError):
    """The servers do not hold the trainer's weights, as far as is known. Nothing is sampled until a reload succeeds."""


class ServerLost(EngineError):
    """A server does not answer. It may come back, or another may take the call."""


class ForeignWeights(EngineError):
    """A server answered with weights that this engine has not put there: it was restarted, or somebody updates it."""
