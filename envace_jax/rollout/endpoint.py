"""Another model as the environment: the simulator's prompts go to an OpenAI-compatible endpoint."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Mapping, Sequence

from envace_jax.config import EndpointConfig
from envace_jax.errors import EndpointError


class Endpoint:
    """complete(prompts) -> texts; it may be called from many threads at once.

    All requests run in one event loop, in a thread of its own. What another try may mend (no connection, a timeout,
    408, 409, 429, 5xx) is tried again after growing pauses, `config.tries` times in all.
    """

    def __init__(self, config: EndpointConfig):
        from openai import AsyncOpenAI  # takes its time to import

        self._config = config
        self._client = AsyncOpenAI(
            base_url=config.base_url,
            api_key=os.environ.get(config.api_key_env) or "none",
            timeout=config.timeout_s,
            max_retries=config.tries - 1,
        )
        self._loop = asyncio.new_event_loop()
        self._slots = asyncio.Semaphore(config.max_in_flight)
        threading.Thread(target=self._loop.run_forever, name="world-endpoint", daemon=True).start()

    def complete(self, prompts: Sequence[Sequence[Mapping[str, str]]]) -> list[str]:
        """The answer to each prompt (a list of messages), in order, asked all at once.

        Raises EndpointError naming the endpoint when one of them has none after all tries.
        """
        return asyncio.run_coroutine_threadsafe(self._complete_all(prompts), self._loop).result()

    async def _complete_all(self, prompts: Sequence[Sequence[Mapping[str, str]]]) -> list[str]:
        return list(await asyncio.gather(*map(self._complete, prompts)))

    async def _complete(self, prompt: Sequence[Mapping[str, str]]) -> str:
        config = self._config
        try:
            async with self._slots:
                reply = await self._client.chat.completions.create(
                    model=config.model or "default",
                    messages=list(prompt),
                    temperature=config.temperature,
                    top_p=config.top_p,
                    max_tokens=config.max_new_tokens,
                )
            return reply.choices[0].message.content or ""
        except Exception as error:  # the client, the server and the network fail in many ways
            said = " ".join(str(error).split())[:300] or type(error).__name__
            raise EndpointError(
                f"{config.base_url}: no answer for a tool call ({said}); check world.endpoint, and that the server runs"
            ) from error
