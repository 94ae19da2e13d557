"""One vLLM server, as it is controlled: checked, paused, given weights, put to sleep.

Blocking, used from the learner's thread and from worker threads, never from an event loop; the calls of rollouts go
their own way (`engine.py`). Invariant: a server that was started without something this engine needs is refused with
the flag by its name.
"""

from __future__ import annotations

import httpx
import orjson
from pydantic import ValidationError

from clawgym_env.engine.base import SamplingParams
from clawgym_env.engine.vllm.errors import ServerLost
from clawgym_env.engine.vllm.wire import GENERATE, Card, Cards, Choice, read_choice, request_body
from clawgym_env.errors import EngineError
from clawgym_env.messages import Json

START = "Start it with: clawgym serve --model POLICY (with --show it only prints the command line)."
CONNECT_S = 10.0
PROBE_S = 300.0
"""The first request of a server compiles and warms up."""
CONTROL_S = 900.0
"""Of one step of a weight update: some hundred gigabytes may have to be read from a disk."""
RPC = "/collective_rpc"
PROBE_TOKENS = 8
CERTAIN = 1e-3
"""Nats. A token drawn with top_k = 1 has log-probability 0 in the distribution it was drawn from."""


class VllmServer:
    """A running server by its URL."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        limits = httpx.Limits(max_keepalive_connections=0)  # after an error vLLM closes what looks open
        self._client = httpx.Client(base_url=self.url, limits=limits, trust_env=False)

    def card(self) -> Card:
        """Return what the server serves; LoRA adapters are no policies of their own.

        Raises:
            ServerLost: nothing answers there.
            EngineError: something else does.
        """
        response = self._request("GET", "/v1/models", b"", timeout_s=PROBE_S)
        try:
            response.raise_for_status()
            cards = [card for card in Cards.model_validate_json(response.content).data if card.parent is None]
        except (httpx.HTTPError, ValidationError) as error:
            raise EngineError(
                f"Expected a vLLM server at {self.url}, got {type(error).__name__}: {error}. {START}"
            ) from error
        if not cards:
            raise EngineError(f"Expected a model at {self.url}/v1/models, got none. {START}")
        if cards[0].max_model_len is None:
            raise EngineError(
                f"Expected the window of the model at {self.url}/v1/models, got no max_model_len. Update vLLM."
            )
        return cards[0]

    def check(self, model: str, token: int) -> None:
        """Check that the route is open and that log-probabilities are those of the distribution sampled from.

        Drawn with top_k = 1 every token is certain; a server that tells the model's raw distribution says otherwise.

        Raises:
            EngineError: naming the flag that is missing.
        """
        logprobs = [
            drawn.logprob for drawn in self.sample(model, [token], SamplingParams(top_k=1), PROBE_TOKENS).tokens
        ]
        if not logprobs:
            raise EngineError(f"Expected log-probabilities with the sampled ids, got none. {START}")
        if max(map(abs, logprobs)) > CERTAIN:
            raise EngineError(
                f"Expected log-probabilities of the distribution that is sampled from, got {min(logprobs):.3f} nats "
                "for a token drawn with top_k=1: the server was started without --logprobs-mode processed_logprobs. "
                f"{START}"
            )

    def check_updatable(self) -> None:
        """Check that the routes of weight updates are open, and that it samples.

        Raises:
            EngineError: naming what opens them.
        """
        self._get("/is_paused")
        self.resume()  # a run that was killed in the middle of an update has left it paused

    def sample(
        self,
        model: str,
        prompt: list[int],
        sampling: SamplingParams,
        num_tokens: int,
        *,
        cache_salt: str | None = None,
    ) -> Choice:
        """Sample exactly `num_tokens`, blocking.

        Raises:
            EngineError: naming the flag that is missing.
        """
        body = request_body(model, prompt, sampling, max_tokens=num_tokens, cache_salt=cache_salt)
        response = self._request("POST", GENERATE, body, timeout_s=PROBE_S)
        if response.status_code in (403, 404, 405):
            raise EngineError(
                f"Expected the server to answer POST {GENERATE}, got {response.status_code}: it was started without "
                f"--enable-scale-out, or is older than vLLM 0.32. {START}"
            )
        raise_for_status(response, self.url)
        return read_choice(response.content)

    def healthy(self) -> bool:
        """Whether it answers and its engine lives."""
        try:
            return self._client.get("/health", timeout=CONNECT_S).status_code == 200
        except httpx.HTTPError:
            return False

    def pause(self) -> None:
        """Stop decoding at the next step; running sequences and the cache stay as they are."""
        self._post("/pause?mode=keep&clear_cache=false")

    def pause_and_clear(self) -> None:
        """Stop decoding at the next step and forget all keys and values; running sequences are read again."""
        # The default, said all the same: with "false" vLLM 0.32 answers from keys and values of the weights before
        # (measured: log-probabilities off by 0.2 nats).
        self._post("/pause?mode=keep&clear_cache=true")

    def resume(self) -> None:
        """Go on after `pause`."""
        self._post("/resume")

    def sleep(self) -> None:
        """Free the GPU: weights go to main memory, keys and values are dropped; running sequences start over."""
        self._post("/sleep?level=1&mode=keep")

    def wake(self, part: str | None = None) -> None:
        """Take the GPU back: "weights", "kv_cache" or both, after which decoding goes on."""
        self._post("/wake_up" if part is None else f"/wake_up?tags={part}")

    def reload(self, folder: str) -> None:
        """Read all weights from a folder in the form of Hugging Face, in place.

        A server of `clawgym serve` does it with `worker/clawgym_worker.py`, another with vLLM's own `reload_weights`:
        there a failure in the middle leaves a model that is neither the old nor the new one, and on a CPU an output
        layer tied to the embedding stays the old one.
        """
        ready = self._request("POST", RPC, orjson.dumps({"method": "clawgym_ready"}))
        if ready.status_code == 200:
            self._post(RPC, {"method": "clawgym_load_weights", "kwargs": {"folder": folder}})
        else:
            self._post(RPC, {"method": "reload_weights", "kwargs": {"weights_path": folder}})

    def name_weights(self, name: str) -> None:
        """Say what the weights are called from here on; `reload` does not."""
        self._post("/update_weight_version", {"new_version": name})

    def weights_name(self) -> str:
        """Return what the weights are called; "default" after a start."""
        return str(orjson.loads(self._get("/weight_info").content)["weight_version"])

    def world_size(self) -> int:
        """Return the number of GPUs that hold the model."""
        found = orjson.loads(self._get("/get_world_size").content)
        return int(found["world_size"])

    def update(self, step: str, body: Json = None) -> None:
        """Post one step of a weight transfer: "init_weight_transfer_engine", "update_weights" and so on."""
        self._post(f"/{step}", body)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _post(self, path: str, body: Json = None) -> None:
        self._checked("POST", path, b"" if body is None else orjson.dumps(body))

    def _get(self, path: str) -> httpx.Response:
        return self._checked("GET", path, b"")

    def _checked(self, method: str, path: str, body: bytes) -> httpx.Response:
        response = self._request(method, path, body)
        if response.status_code in (403, 404, 405):
            raise EngineError(
                f"Expected the server at {self.url} to answer {method} {path}, got {response.status_code}. Start it "
                f"with VLLM_SERVER_DEV_MODE=1 in its environment. {START}"
            )
        raise_for_status(response, self.url)
        return response

    def _request(self, method: str, path: str, body: bytes, *, timeout_s: float = CONTROL_S) -> httpx.Response:
        timeout = httpx.Timeout(timeout_s, connect=CONNECT_S)
        headers = {"content-type": "application/json"}
        try:
            return self._client.request(method, path, content=body, headers=headers, timeout=timeout)
        except httpx.TransportError as error:
            raise ServerLost(
                f"Expected a vLLM server at {self.url}, got {type(error).__name__}: {error}. {START}"
            ) from error


def raise_for_status(response: httpx.Response, url: str) -> None:
    """Raise what a server says of its failure.

    Raises:
        EngineError: the status is one.
    """
    if response.status_code >= 400:
        raise EngineError(
            f"Expected the vLLM server at {url} to answer {response.request.url.path}, got {response.status_code}: "
            f"{response.text[:300]}. Look at its log."
        )
