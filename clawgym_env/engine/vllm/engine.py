"""An engine over HTTP: vLLM servers answer, token ids in and token ids out.

The proxy awaits `generate` as with the embedded engine. Made without a policy of this process it only samples what the
servers hold; made with the policy that a learner trains, `update_weights` puts each new version into all of them.
Invariants: before the first call every server has shown that its log-probabilities are those of the distribution it
samples from; a sampled token is dated by the weights that the server says it came from; and no token is given out that
was sampled from weights not known to be the trainer's.

The servers hold a copy: they go on sampling while `apply` runs and the new weights are published, and stand still only
while they load them. Each version has a cache of prefixes of its own (`cache_salt`), beside being paused with
`clear_cache`: either would do, and a later vLLM may drop one.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from clawgym_env.engine.base import Generation, SamplingParams, TokenIds
from clawgym_env.engine.vllm.calls import Calls
from clawgym_env.engine.vllm.errors import ForeignWeights, ServerLost, UpdateNotSupported, WeightSyncError
from clawgym_env.engine.vllm.gate import Gate
from clawgym_env.engine.vllm.probe import Probe
from clawgym_env.engine.vllm.replicas import Replica, cheapest, prefix_blocks
from clawgym_env.engine.vllm.server import VllmServer
from clawgym_env.engine.vllm.settings import VllmSettings
from clawgym_env.engine.vllm.wire import generation_of, request_body
from clawgym_env.engine.weight_sync import FileSync, WeightSync
from clawgym_env.errors import ContextOverflow, EngineError
from clawgym_env.policy import Policy, PolicyText, load_text, policy_folder

if TYPE_CHECKING:
    from renderers.base import Renderer

    from clawgym_env.tokenizer import TextTokenizer

logger = logging.getLogger(__name__)

ATTEMPTS = 4
"""Times one call is asked, where servers are lost or turn out to be restarted."""
RETRY_S = 0.5
"""Between two looks for a lost server."""
LOADING = "loading"
"""What a server calls its weights while they change: of no version, so that nothing is taken from a half-loaded one."""


class VllmEngine:
    """Satisfies `engine.base.Engine`. Made by `connect`."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        *,
        model: str,
        tokenizer: TextTokenizer,
        renderer: Renderer,
        context_length: int,
        policy: Policy | None,
        settings: VllmSettings,
        sync: WeightSync,
    ) -> None:
        self.tokenizer = tokenizer
        self._replicas = replicas
        self._model = model
        self._renderer = renderer
        self._stops = frozenset(renderer.get_stop_token_ids())
        self._context_length = context_length
        self._policy = policy
        self._settings = settings
        self._sync = sync
        self._probe = None if policy is None else Probe(policy, tolerance=settings.tolerance)
        self._run = uuid.uuid4().hex[:8]
        self._weights: str | None = None
        """What the servers call the weights that they hold, where these are the policy's."""
        self._versions: dict[str, int] = {}
        """Of earlier weights, by name: a sequence that ran through an update has tokens of several."""
        self._calls = Calls(settings.max_concurrency)
        self._gate = Gate()
        # Whoever changes what the servers hold, or whether they run, has it: the learner's thread, or one that brings
        # a lost server back.
        self._control = threading.RLock()
        self._published = False
        self._paused = False
        self._asleep = False
        self._searches: dict[Replica, asyncio.Task[None]] = {}
        self._closed = False

    @classmethod
    def connect(
        cls,
        urls: str | Sequence[str],
        *,
        cache: Path,
        policy: str | Path | Policy | None = None,
        renderer: str | None = None,
        settings: VllmSettings = VllmSettings(),
        sync: WeightSync | None = None,
    ) -> VllmEngine:
        """Ask running servers for their model, load the renderer and check how they answer. Blocking.

        Args:
            urls: of one server, or of several with the same model, a sequence or separated by commas.
            cache: where built policies are kept.
            policy: the served policy by name, or its folder on this machine; by default the folder that the server
                was started with. A loaded `Policy` is one under training: its weights are put into the servers now
                and at every `update_weights`.
            renderer: "chatml" or a family name of the `renderers` library; by default what the folder says or is.
            sync: how weights travel, instead of what `settings.sync` says.

        Raises:
            EngineError: no server there, one that was started without a flag this engine needs, which is named, or
                several with different models.
        """
        listed = urls.split(",") if isinstance(urls, str) else urls
        servers = [VllmServer(url.strip()) for url in listed if url.strip()]
        if not servers:
            raise EngineError(f"Expected the URL of a vLLM server, got {urls!r}. Say vllm:http://HOST:PORT.")
        try:
            cards = [server.card() for server in servers]
            if len({(card.id, card.max_model_len) for card in cards}) > 1:
                shown = ", ".join(f"{card.id} ({card.max_model_len})" for card in cards)
                raise EngineError(f"Expected servers of one model and window, got {shown}. Start them alike.")
            card = cards[0]
            window = card.max_model_len or 0
            if isinstance(policy, Policy):
                text: Policy | PolicyText = policy
                window = min(window, policy.context_length)
            else:
                served = policy or card.root or card.id
                if not (policy_folder(served, cache) / "tokenizer.json").is_file():
                    raise EngineError(
                        f"Expected the policy's folder with a tokenizer.json on this machine, got {str(served)!r}. "
                        f"Name it: vllm:{servers[0].url}#FOLDER"
                    )
                text = load_text(served, cache=cache, renderer=renderer)
            engine = cls(
                [Replica(server) for server in servers],
                model=card.id,
                tokenizer=text.tokenizer,
                renderer=text.renderer,
                context_length=window,
                policy=policy if isinstance(policy, Policy) else None,
                settings=settings,
                sync=sync or _weight_sync(settings),
            )
            engine._begin()
        except BaseException:
            for server in servers:
                server.close()
            raise
        return engine

    @property
    def renderer(self) -> Renderer:
        return self._renderer

    @property
    def context_length(self) -> int:
        return self._context_length

    @property
    def policy_version(self) -> int:
        """Counts weight updates, from 0; always 0 where the weights are not this process's."""
        return 0 if self._policy is None else self._policy.version

    async def generate(self, prompt_token_ids: Sequence[int] | TokenIds, sampling: SamplingParams) -> Generation:
        """Sample one turn. Cancelling the task closes the connection, on which the server aborts the sequence.

        A call whose server is lost is asked again of another, or of the same when it is back.

        Raises:
            ContextOverflow: no room for a single new token.
            EngineError: no server can be reached, one refuses or answers what was not asked for, or the weights could
                not be updated.
        """
        room = self._context_length - len(prompt_token_ids)
        if room < 1:
            raise ContextOverflow(len(prompt_token_ids), self._context_length)
        prompt = np.asarray(prompt_token_ids, dtype=np.int32)
        blocks = prefix_blocks(prompt) if len(self._replicas) > 1 else []
        version_of = None if self._policy is None else self._version_of
        failure: EngineError | None = None
        for _ in range(ATTEMPTS):
            self._check_open()
            await self._gate.passed()
            if self._asleep:
                await asyncio.to_thread(self.wake)
            replica = await self._found(blocks)
            body = request_body(
                self._model,
                prompt,
                sampling,
                max_tokens=min(sampling.max_tokens, room),
                stop_token_ids=self._stops,
                cache_salt=self._weights,
            )
            term = replica.term
            try:
                choice = await self._calls.ask(replica, body)
                await self._gate.passed()  # what was sampled under new weights waits until they are known to be right
                generation = generation_of(choice, stop_token_ids=self._stops, version_of=version_of)
            except (ServerLost, ForeignWeights) as error:
                logger.warning("%s The call is asked again.", error)
                replica.lost, failure = replica.lost or replica.term == term, error
                continue
            except EngineError:
                await self._gate.passed()  # a failed update, which gives up all calls, is the better reason
                raise
            replica.remember(blocks)
            return generation
        raise EngineError(f"Expected an answer in {ATTEMPTS} attempts, got: {failure}") from failure

    def update_weights(self, apply: Callable[[], None]) -> int:
        """Run `apply` on the policy of this process, put its weights into every server, and return the new version.

        Servers that are lost are left out, and get the weights when they are back. Blocking.

        Raises:
            UpdateNotSupported: this engine was made without the policy.
            WeightSyncError: a server could not be updated, or has other log-probabilities than the trainer now.
                Nothing is sampled until this, or `reload`, has succeeded.
        """
        policy = self._policy
        if policy is None:
            raise UpdateNotSupported(
                "Expected an engine over weights of this process, got vLLM servers without the policy, which can only "
                "be sampled from. Give it: registry.engine('vllm:URL', policy=policy), then TreeGRPO(policy, "
                "engine=...)."
            )
        self._check_open()
        policy.check_sole(self)
        with self._control:
            if self._settings.sleep:
                self.sleep()
            if self._weights is not None:
                self._versions[self._weights] = policy.version
            try:
                apply()
            except BaseException as error:
                self._fail(f"the optimizer's step failed half-way: {error!r}", error)
                raise
            finally:
                policy.epoch += 1
                policy.version += 1
                self._published = False
            self.reload()
        return policy.version

    def reload(self) -> None:
        """Put the policy's weights into every server and check what came of it, as after a failed update. Blocking.

        Raises:
            WeightSyncError: it failed.
        """
        with self._control:
            try:
                self._publish()
                self._load(self._reachable())
            except Exception as error:
                raise self._fail(f"{error or repr(error)}", error) from error
            except BaseException as interrupt:
                self._fail(repr(interrupt), interrupt)
                raise

    def sleep(self) -> None:
        """Have the servers free their GPU memory until the next update or call. Blocking.

        Raises:
            EngineError: a server cannot (`--enable-sleep-mode`).
        """
        with self._control:
            if not self._asleep:
                self._each(VllmServer.sleep)
                self._asleep = True

    def wake(self) -> None:
        """Have the servers take their GPU memory back, with the weights they had. Blocking."""
        with self._control:
            if self._asleep:
                self._each(VllmServer.wake)
                self._asleep = False
                self._forget()

    async def pause(self) -> None:
        """Stop decoding on the servers; running sequences keep their state.

        Raises:
            EngineError: a server has no such route (VLLM_SERVER_DEV_MODE=1 opens it).
        """
        self._check_open()
        await asyncio.to_thread(self._set_paused, True)

    async def resume(self) -> None:
        """Go on after `pause`.

        Raises:
            EngineError: a server has no such route.
        """
        self._check_open()
        await asyncio.to_thread(self._set_paused, False)

    async def close(self) -> None:
        """Close the connections and let go of the policy. What is being generated is aborted. Idempotent."""
        if self._closed:
            return
        self._closed = True
        await self._calls.close()
        for replica in self._replicas:
            replica.server.close()
        self._sync.close()
        if self._policy is not None:
            self._policy.release(self)

    def _begin(self) -> None:
        """Check every server, and give it the policy's weights where there is one."""
        for replica in self._replicas:
            self._check(replica.server)
        if self._policy is not None:
            self._policy.claim(self)
            try:
                self.reload()
            except BaseException:
                self._policy.release(self)
                self._sync.close()
                raise

    def _check(self, server: VllmServer) -> None:
        if self._policy is not None:
            server.check_updatable()
        server.check(self._model, min(self._stops))

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("Expected an open engine, got a closed one.")

    # Weights.

    def _version_of(self, weights: str) -> int:
        if weights in self._versions:
            return self._versions[weights]
        if weights == self._weights:
            return self.policy_version  # not kept: a learner that goes on from a checkpoint sets it after its update
        raise ForeignWeights(
            f"Expected weights that this run has put into its servers, got {weights!r}: a server was restarted, or is "
            "updated by somebody else."
        )

    def _publish(self) -> None:
        if not self._published and self._policy is not None:
            self._sync.publish(self._policy)
            self._published = True

    def _load(self, replicas: Sequence[Replica]) -> None:
        """Load what is published into servers, with nobody sampling from them, and compare."""
        assert self._policy is not None, "only weights of this process are loaded"
        servers = [replica.server for replica in replicas]
        self._gate.close()
        self._weights = f"{self._run}-{self._policy.epoch}"
        self._put(servers, self._weights, asleep=self._asleep)
        self._asleep = False
        for replica in replicas:
            self._compare(replica.server)
            replica.forget()
        if self._paused:
            self._each(VllmServer.pause)
        self._gate.open()

    def _put(self, servers: Sequence[VllmServer], weights: str, *, asleep: bool) -> None:
        """Have servers, standing still, take what is published, under its name, and go on."""
        for server in servers:
            if asleep:
                server.wake("weights")
            else:
                server.pause_and_clear()
            server.name_weights(LOADING)
        self._sync.load(servers)
        for server in servers:
            server.name_weights(weights)
            if asleep:
                server.wake("kv_cache")
            server.resume()

    def _compare(self, server: VllmServer) -> None:
        assert self._probe is not None, "made with the policy"
        assert self._weights is not None, "weights are compared after they were loaded"
        difference = self._probe.check(server, self._model, weights=self._weights)
        logger.info("%s: log-probabilities within %.1e nats of the trainer's.", server.url, difference)

    def _fail(self, why: str, cause: BaseException) -> WeightSyncError:
        """Let nobody sample any more, and give up all calls; a server that was being loaded stays paused."""
        error = WeightSyncError(
            f"Expected every vLLM server to take the trainer's weights, got: {why} What they hold is not to be sampled "
            "from: nothing is until a reload succeeds. Look at the servers' logs; after a crash start them again and "
            "go on with the run's checkpoint."
        )
        error.__cause__ = cause
        self._gate.close()
        self._gate.fail(error)
        self._calls.cancel()
        return error

    # Servers that come and go.

    async def _found(self, blocks: Sequence[int]) -> Replica:
        """Return the server for a prompt, waiting for one where all are lost.

        Raises:
            EngineError: none came back in time.
        """
        searches = [self._search(replica) for replica in self._replicas if replica.lost]
        while not (ready := [replica for replica in self._replicas if not replica.lost]):
            running = [task for task in searches if not task.done()]
            if not running:
                failure = next((task.exception() for task in searches if not task.cancelled()), None)
                raise EngineError(f"Expected a vLLM server to be back, got: {failure}") from failure
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        return cheapest(ready, blocks)

    def _search(self, replica: Replica) -> asyncio.Task[None]:
        """Look for a lost server in the background, unless that is being done."""
        task, loop = self._searches.get(replica), asyncio.get_running_loop()
        if task is None or task.done() or task.get_loop() is not loop:
            task = self._searches[replica] = loop.create_task(asyncio.to_thread(self._bring_back, replica))
            task.add_done_callback(lambda done: None if done.cancelled() else done.exception())
        return task

    def _reachable(self) -> list[Replica]:
        """Return the servers that live, at least one; the others are lost, and nothing is sampled from them."""
        for replica in self._replicas:
            if not replica.lost and not replica.server.healthy():
                logger.warning("%s does not answer: the update leaves it out.", replica.server.url)
                replica.lost = True
        return [replica for replica in self._replicas if not replica.lost] or [self._awaited()]

    def _awaited(self) -> Replica:
        """Return the first server that is back, where all are lost.

        Raises:
            ServerLost: none is in time.
        """
        deadline = time.monotonic() + self._settings.reconnect_s
        while time.monotonic() < deadline and not self._closed:
            for replica in self._replicas:
                if replica.server.healthy():
                    self._check(replica.server)
                    replica.term += 1
                    replica.lost = False
                    return replica
            time.sleep(RETRY_S)
        raise ServerLost(f"Expected one of {len(self._replicas)} vLLM servers within {self._settings.reconnect_s:g} s.")

    def _bring_back(self, replica: Replica) -> None:
        """Wait for a lost server and give it the present weights.

        Raises:
            EngineError: it did not come back, or not as it was.
        """
        server = replica.server
        deadline = time.monotonic() + self._settings.reconnect_s
        while not server.healthy():
            if time.monotonic() > deadline or self._closed:
                raise ServerLost(
                    f"Expected a vLLM server at {server.url}, got none for {self._settings.reconnect_s:g} s."
                )
            time.sleep(RETRY_S)
        with self._control:
            if not replica.lost or self._closed:
                return
            if (model := server.card().id) != self._model:
                raise EngineError(f"Expected model {self._model!r} at {server.url}, got {model!r}.")
            self._check(server)
            if self._weights is not None:
                if server.weights_name() != self._weights:  # it was started anew, or has missed an update
                    self._publish()
                    self._put([server], self._weights, asleep=False)
                self._compare(server)
            if self._paused:
                server.pause()
            replica.forget()
            replica.term += 1
            replica.lost = False
        logger.warning("%s is back.", server.url)

    def _set_paused(self, paused: bool) -> None:
        with self._control:
            self._each(VllmServer.pause if paused else VllmServer.resume)
            self._paused = paused

    def _each(self, action: Callable[[VllmServer], None]) -> None:
        for replica in self._replicas:
            if not replica.lost:
                action(replica.server)

    def _forget(self) -> None:
        for replica in self._replicas:
            replica.forget()


def _weight_sync(settings: VllmSettings) -> WeightSync:
    if settings.sync == "nccl":
        from clawgym_env.engine.weight_sync_nccl import NcclSync

        return NcclSync()
    return FileSync(settings.weights)
