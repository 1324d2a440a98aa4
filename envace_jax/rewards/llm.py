"""An LLM as judge, behind one or several OpenAI-compatible endpoints.

    judge = LLMJudge(["http://127.0.0.1:8000/v1"], "Qwen3-30B-A3B", cache=VerdictCache("verdicts.jsonl"))
    judge.answer(questions)      [True, None, ...]: waits; may be called from many threads at once

All requests run in one event loop, in a thread of its own. A question is looked up in the cache, joins an equal one
that is being asked already, or is asked: at most `tries` times, the endpoints in turn, with growing pauses. What is not
a verdict by the schema is tried again like an error; a question that never gets one is answered None.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError
from typing import Any

from envace_jax.rewards.cache import VerdictCache, content_key
from envace_jax.rewards.checklist import Question
from envace_jax.rewards.prompting import SCHEMA, judge_messages, read_verdict

# Statuses below 500 that another try may mend; the others say that the endpoint will not have this request.
PASSING_STATUSES = frozenset({408, 409, 425, 429})


class LLMJudge:
    """Answers checklist questions by asking a model. Implements `envace_jax.rewards.Judge`.

    Args:
        endpoints: base URLs that serve `model`, asked in turn.
        model: its name there.
        cache: of verdicts; None: in memory.
        api_key: sent to all endpoints.
        temperature, top_p, max_new_tokens: of the judge's sampling.
        timeout_s: for one request, from its start to its last byte.
        tries: requests for one question.
        max_in_flight: requests at a time, over all callers.
        backoff_s, backoff_cap_s: the pause after a failed try doubles from the first up to the second; a random half of
            it is left out, so that callers spread. A server's own `Retry-After` counts where it is longer.
        seed: of the pauses.

    Raises ValueError without endpoints.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        model: str,
        *,
        cache: VerdictCache | None = None,
        api_key: str | None = None,
        temperature: float = 0.6,
        top_p: float = 0.8,
        max_new_tokens: int = 6000,
        timeout_s: float = 120.0,
        tries: int = 5,
        max_in_flight: int = 500,
        backoff_s: float = 1.0,
        backoff_cap_s: float = 30.0,
        seed: int = 0,
    ):
        from openai import AsyncOpenAI  # takes its time to import

        if not endpoints:
            raise ValueError("a judge needs at least one endpoint")
        self._cache = VerdictCache() if cache is None else cache
        self._sampling = {"model": model, "temperature": temperature, "top_p": top_p, "max_tokens": max_new_tokens}
        self._tries, self._timeout_s = tries, timeout_s
        self._backoff_s, self._backoff_cap_s = backoff_s, backoff_cap_s
        self._random = random.Random(seed)
        self._asking: dict[str, asyncio.Future[bool | None]] = {}
        self._slots = asyncio.Semaphore(max_in_flight)
        self._turn = 0
        self._counts: Counter[str] = Counter()
        self._seconds = 0.0
        self._lock = threading.Lock()
        self.last_error: str | None = None  # why the latest failed try failed
        # Tries are counted and spread over the endpoints here; the client makes each request once.
        self._clients = {
            url: AsyncOpenAI(base_url=url, api_key=api_key or "none", max_retries=0, timeout=timeout_s)
            for url in endpoints
        }
        self._loop = asyncio.new_event_loop()
        self._closed = False
        threading.Thread(target=self._loop.run_forever, name="llm-judge", daemon=True).start()

    def answer(self, questions: Sequence[Question]) -> list[bool | None]:
        """The verdicts, in order; None where there is none, or where the judge was closed meanwhile."""
        if self._closed:
            return [None] * len(questions)
        future = asyncio.run_coroutine_threadsafe(self._answer_all(questions), self._loop)
        try:
            return future.result()
        except CancelledError:
            return [None] * len(questions)
        except BaseException:  # the caller was interrupted
            future.cancel()
            raise

    def metrics(self) -> dict[str, float]:
        """Counts since the last call of this function; `judge/seconds` is the mean time of a request."""
        with self._lock:
            counts, seconds = self._counts, self._seconds
            self._counts, self._seconds = Counter(), 0.0
        names = ("questions", "requests", "retries", "no_verdict", "cache_hits")
        mean = seconds / counts["requests"] if counts["requests"] else 0.0
        return {**{f"judge/{name}": float(counts[name]) for name in names}, "judge/seconds": mean}

    def close(self) -> None:
        """Give up what is being asked; callers that wait get None. The verdicts so far are on disk."""
        if self._closed:
            return
        self._closed = True

        async def end() -> None:
            others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            await asyncio.gather(*(client.close() for client in self._clients.values()), return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._cache.close()

    # Everything below runs in the loop's thread.

    async def _answer_all(self, questions: Sequence[Question]) -> list[bool | None]:
        return list(await asyncio.gather(*(self._answer(question) for question in questions)))

    async def _answer(self, question: Question) -> bool | None:
        self._count("questions")
        messages = judge_messages(question)
        key = content_key({**self._sampling, "messages": messages})
        known = self._cache.get(key)
        if known is not None:
            self._count("cache_hits")
            return known
        if key in self._asking:
            self._count("cache_hits")
            return await asyncio.shield(self._asking[key])
        self._asking[key] = future = self._loop.create_future()
        verdict = None
        try:
            verdict = await self._ask(messages)
            if verdict is None:
                self._count("no_verdict")
            else:
                about = {"task": question.task.id, "turn": question.turn, "step": question.step}
                try:
                    self._cache.put(key, verdict, **about, item=question.item.id)
                except OSError as error:  # the verdict stands all the same
                    self.last_error = f"reward.cache: a verdict could not be written ({error.strerror})"
        finally:
            del self._asking[key]
            future.set_result(verdict)
        return verdict

    async def _ask(self, messages: list[dict[str, str]]) -> bool | None:
        refused: set[str] = set()
        for number in range(self._tries):
            url = self._next_endpoint(refused)
            if url is None:
                return None
            if number:
                self._count("retries")
            try:
                async with self._slots:
                    return read_verdict(await self._request(url, messages))
            except (
                Exception
            ) as error:  # the client, the server and the model fail in many ways, and each is a failed try
                status = getattr(error, "status_code", None)
                self.last_error = f"{url}: {_describe(error, self._timeout_s)}"
                if status is not None and 400 <= status < 500 and status not in PASSING_STATUSES:
                    refused.add(url)
                elif number + 1 < self._tries:
                    await asyncio.sleep(self._pause(number, error))
        return None

    async def _request(self, url: str, messages: list[dict[str, str]]) -> str | None:
        self._count("requests")
        began = time.perf_counter()
        try:
            # The client's own timeout starts anew with every byte that drips in.
            async with asyncio.timeout(self._timeout_s):
                reply = await self._clients[url].chat.completions.create(
                    messages=messages,
                    response_format={
                        "type": "json_schema",
                        "json_schema": {"name": "verdict", "strict": True, "schema": SCHEMA},
                    },
                    **self._sampling,
                )
            return reply.choices[0].message.content
        finally:
            with self._lock:
                self._seconds += time.perf_counter() - began

    def _next_endpoint(self, refused: set[str]) -> str | None:
        for _ in self._clients:
            url = list(self._clients)[self._turn % len(self._clients)]
            self._turn += 1
            if url not in refused:
                return url
        return None

    def _pause(self, number: int, error: Exception) -> float:
        longest = min(self._backoff_s * 2**number, self._backoff_cap_s)
        headers: Mapping[str, str] = getattr(getattr(error, "response", None), "headers", None) or {}
        try:
            wished = min(max(float(headers.get("retry-after", 0)), 0.0), self._backoff_cap_s)
        except ValueError:  # a date
            wished = 0.0
        return max(longest * self._random.uniform(0.5, 1.0), wished)

    def _count(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1


def _describe(error: Exception, timeout_s: float) -> str:
    if isinstance(error, TimeoutError) or "Timeout" in type(error).__name__:
        return f"no reply within {timeout_s:g} s"
    said: Any = " ".join(str(error).split()) or type(error).__name__
    return said[:300]
