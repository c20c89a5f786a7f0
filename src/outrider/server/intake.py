"""From requests of the API to requests of the engine: prompts, sampling parameters, grammar, method.

Grammars are compiled and prompts are encoded off the event loop; what is too long is refused before it is encoded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

from outrider.api import LLM
from outrider.codecs.grammar_source import SourceLimits
from outrider.codecs.infill import infill_prompt
from outrider.core.errors import OutriderError, RequestError
from outrider.core.params import Grammar, SamplingParams
from outrider.core.prompts import Prompt
from outrider.methods import METHODS
from outrider.server.chat_prompts import TRUNCATED, ChatPrompts
from outrider.server.failures import ApiError
from outrider.server.grammars import Grammars
from outrider.server.messages import joined_text, plain_message
from outrider.server.metrics import Metrics
from outrider.server.parameters import grammar_source, sampling_params, with_seed
from outrider.server.protocol import ChatMessage, ChatRequest, CompletionRequest, SamplingFields, Speculation
from outrider.server.queued_request import DEFAULT_LANE, FixedLane, Order, PredictedLane, Shown
from outrider.server.quota import Client
from outrider.server.settings import ServerSettings
from outrider.server.tools import ToolPlan, plan_tools
from outrider.vision.messages import parted
from outrider.vision.pixels import ImageLimits, opened

_COMPLETION_TOKENS = 16
"""The API's default number of tokens for a completion."""
_ENCODERS = 4


@dataclass(frozen=True, eq=False)
class _Draft:
    """An order whose prompts are not encoded yet."""

    body: SamplingFields
    params: SamplingParams
    order: Order
    """The rest of the order."""


@final
class Intake:
    """Reads requests for one model."""

    def __init__(self, llm: LLM, settings: ServerSettings, metrics: Metrics) -> None:
        self._llm, self._settings = llm, settings
        self.grammars = Grammars(llm.codec, settings, metrics)
        self._chats = ChatPrompts(llm)
        self._limits = SourceLimits(settings.schema_bytes, settings.schema_depth)
        self._threads = ThreadPoolExecutor(_ENCODERS, "outrider-encode")

    def close(self) -> None:
        self.grammars.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def completion(self, body: CompletionRequest, client: Client) -> Order:
        num_each = max(body.n, body.best_of or 1)
        if num_each > body.n and body.stream:
            raise ApiError(400, "best_of chooses among whole answers, so it cannot stream; leave one out", param="best_of")
        prompts = _prompts(body.prompt)
        self._check_choices(len(prompts), num_each)
        grammar = await self._grammar(body, client, ToolPlan())
        most = self._most_tokens(client)
        tokens = min(_COMPLETION_TOKENS, most) if body.max_tokens is None else self._checked(body.max_tokens, most)
        logprobs = 0 if num_each > body.n and body.logprobs is None else body.logprobs
        params = self._params(body, max_tokens=tokens, logprobs=logprobs, grammar=grammar)
        scored = body.logprobs if body.echo and body.logprobs is not None else body.prompt_logprobs
        num_best = body.n if num_each > body.n else None
        known = replace(_order_of(body, num_each), num_best=num_best, prompt_logprobs=scored, is_scored_only=tokens == 0)
        encode = [partial(self._encode_prompt, body, prompt) for prompt in prompts]
        return await self._finish(_Draft(body, params, known), encode)

    async def chat(self, body: ChatRequest, client: Client, *, drops_oldest: bool = False) -> Order:
        """``drops_oldest``: leave out the oldest turns of a conversation that is too long."""
        plan = plan_tools(body)
        self._check_choices(1, body.n)
        self._check_messages(len(body.messages), is_cut=drops_oldest or body.truncate_prompt_tokens is not None)
        grammar = await self._grammar(body, client, plan)
        asked, most = body.max_completion_tokens or body.max_tokens, self._most_tokens(client)
        tokens = min(self._settings.default_tokens, most) if asked is None else self._checked(asked, most)
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        params = self._params(body, max_tokens=tokens, logprobs=logprobs, grammar=grammar)
        if drops_oldest:
            room = self._longest - min(tokens, self._longest // 2)
            body = await self._off_loop(partial(self._chats.fitting, body, plan, room))
        text, images = await self._off_loop(partial(self._chats.text, body, plan))
        if images and body.prompt_logprobs is not None:
            raise ApiError(400, "prompt_logprobs are of text; leave them out of a prompt with images", param="prompt_logprobs")
        params, reader = self._chats.reader(params, plan, text)
        known = replace(_order_of(body, body.n), function=plan.function, is_required=plan.is_required, new_reader=reader)
        known = replace(known, is_legacy=plan.is_legacy, prompt_logprobs=body.prompt_logprobs)
        known = replace(known, shown=replace(known.shown, reasoning=body.include_reasoning))
        special = self._llm.codec.chat_template is None or body.add_special_tokens
        encode = partial(self._encode, text, truncate=body.truncate_prompt_tokens, special=special)
        return await self._finish(_Draft(body, params, known), [lambda: (self._seen(encode(), images), text)])

    async def tokens_of(
        self, text: str | None, messages: Sequence[ChatMessage] | None, *, special: bool, is_open: bool
    ) -> list[int]:
        """Tokens of a text, or of a conversation that ``is_open`` for the assistant's next turn."""

        self._check_messages(len(messages or ()), is_cut=True)

        def encoded() -> list[int]:
            if messages is None:
                return self._llm.codec.encode_within(text or "", TRUNCATED * self._longest, add_special_tokens=special)
            said, images = parted([plain_message(message) for message in messages])
            if images:
                raise RequestError("tokens are counted for text only; leave the images out")
            said = self._chats.render(said, {"add_generation_prompt": is_open})
            return self._llm.codec.encode_within(said, TRUNCATED * self._longest, add_special_tokens=False)

        return await self._off_loop(encoded)

    async def text_of(self, token_ids: Sequence[int]) -> str:
        return await self._off_loop(lambda: self._llm.codec.decode(token_ids))

    async def _off_loop(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, _refusing, work)

    async def _grammar(self, body: SamplingFields, client: Client, plan: ToolPlan) -> Grammar | None:
        source = grammar_source(body, self._limits, schema=plan.schema())
        return None if source is None else await self.grammars.get(source, client.name)

    def _most_tokens(self, client: Client) -> int:
        return min(self._settings.max_tokens, client.max_tokens or self._settings.max_tokens)

    def _checked(self, asked: int, most: int) -> int:
        if asked > most:
            raise ApiError(400, f"max_tokens = {asked} is more than is allowed here; use at most {most}", param="max_tokens")
        return asked

    def _params(
        self, body: SamplingFields, *, max_tokens: int, logprobs: int | None, grammar: Grammar | None
    ) -> SamplingParams:
        size, codec = self._llm.target.vocab_size, self._llm.codec
        make = partial(sampling_params, body, codec, max_tokens=max(1, max_tokens), logprobs=logprobs, vocab_size=size)
        return _refusing(lambda: make(grammar=grammar))

    def _check_choices(self, num_prompts: int, num_each: int) -> None:
        count, most = num_prompts * num_each, self._settings.max_choices
        if count > most:
            message = f"{num_prompts} prompts times {num_each} make {count} choices; ask for at most {most}"
            raise ApiError(400, message, param="n")

    def _check_messages(self, count: int, *, is_cut: bool) -> None:
        """Refuse more messages than fit into the context at one token each, before a template renders them."""
        if count > (TRUNCATED if is_cut else 1) * self._longest:
            raise ApiError(400, f"{count} messages do not fit into the model's context; send fewer", param="messages")

    async def _finish(self, draft: _Draft, encode: Sequence[Callable[[], tuple[Prompt, str]]]) -> Order:
        return await self._off_loop(lambda: self._complete(draft, [make() for make in encode]))

    def _complete(self, draft: _Draft, encoded: Sequence[tuple[Prompt, str]]) -> Order:
        num_each = draft.order.num_each
        spread = [pair for pair in encoded for _ in range(num_each)]
        each = [with_seed(draft.params, index % num_each) for index in range(len(spread))]
        requests = self._llm.requests([ids for ids, _ in spread], each, streaming=True)
        is_echoed = isinstance(draft.body, CompletionRequest) and draft.body.echo
        prompts = [text for _, text in spread] if is_echoed else []
        total = sum(len(request.prompt_ids) for request in requests[::num_each])
        lane = self._lane(draft.body, draft.order.lane)
        return replace(draft.order, requests=requests, prompts=prompts, num_prompt_tokens=total, lane=lane)

    def _lane(self, body: SamplingFields, lane: Hashable) -> Hashable:
        if body.prediction is None or lane != DEFAULT_LANE:
            return lane
        text = joined_text(body.prediction.content, "prediction")
        ids = self._llm.codec.encode_within(text, self._longest, add_special_tokens=False) if text else []
        return PredictedLane(tuple(ids)) if ids else lane

    @property
    def _longest(self) -> int:
        return self._llm.target.max_len - 1

    def _encode(self, text: str, *, truncate: int | None, special: bool = True) -> list[int]:
        limit = self._longest if truncate is None else TRUNCATED * self._longest
        return self._kept(self._llm.codec.encode_within(text, limit, add_special_tokens=special), truncate)

    def _kept(self, ids: list[int], truncate: int | None) -> list[int]:
        """The last tokens of a prompt: as many as asked for, or as many as fit if that is -1."""
        return ids if truncate is None else ids[-(self._longest if truncate < 0 else truncate) :]

    def _encode_prompt(self, body: CompletionRequest, prompt: str | Sequence[int]) -> tuple[list[int], str]:
        codec = self._llm.codec
        if isinstance(prompt, str):
            if body.suffix:
                return infill_prompt(codec, prompt, body.suffix, limit=self._longest), prompt
            return self._encode(prompt, truncate=body.truncate_prompt_tokens, special=body.add_special_tokens), prompt
        ids = self._kept(list(prompt), body.truncate_prompt_tokens)
        if len(ids) > self._longest:
            raise RequestError(
                f"the prompt has {len(ids)} tokens and the model's context holds {self._longest + 1}; shorten it"
            )
        return ids, codec.decode(ids) if body.echo else ""

    def _seen(self, ids: list[int], images: list[bytes]) -> Prompt:
        """Tokens with the images of their placeholders, decoded within the server's limits."""
        limits, most = ImageLimits(self._settings.max_body_bytes, self._settings.max_image_pixels), self._settings.max_images
        if len(images) > most:
            raise RequestError(f"the messages hold {len(images)} images, and at most {most} are taken; send fewer")
        return {"prompt": ids, "images": [opened(image, limits) for image in images]} if images else ids


def _prompts(prompt: Any) -> list[Any]:
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise ApiError(400, "the prompt is empty; give text or token ids", param="prompt")
    return [prompt] if isinstance(prompt[0], int) else list(prompt)


def _order_of(body: SamplingFields, num_each: int) -> Order:
    """An order without prompts: its lane, its draft length limit, and what is shown."""
    wanted, shown = body.speculation, Shown(body.return_token_ids, body.return_tokens_as_token_ids)
    more: dict[str, Any] = {"priority": body.priority, "shares_prefix": body.cache_salt is None}
    more |= {"num_each": num_each, "shown": shown}
    if not isinstance(wanted, Speculation):
        return Order([], [], DEFAULT_LANE, 0 if wanted == "off" else None, False, **more)
    if wanted.method is not None:
        _refusing(lambda: METHODS[wanted.method or ""])  # an unknown name is refused with the nearest one
    lane: Hashable = wanted.method or DEFAULT_LANE
    if wanted.num_draft_tokens is not None:
        lane = FixedLane(wanted.method or DEFAULT_LANE, wanted.num_draft_tokens)
    return Order([], [], lane, wanted.max_tokens, wanted.trace, **more)


def _refusing(work: Callable[[], Any]) -> Any:
    """Run the work, and turn errors of the engine into API errors."""
    try:
        return work()
    except OutriderError as error:
        raise refusal(error) from None
    except (UnicodeError, TypeError, OverflowError) as error:  # of the tokenizer: half a surrogate pair, a token below zero
        raise ApiError(400, f"the prompt is no text or tokens ({error}); send valid Unicode or token ids") from None


def refusal(error: OutriderError) -> ApiError:
    """An error of the engine as an API error."""
    return ApiError(400, str(error))
