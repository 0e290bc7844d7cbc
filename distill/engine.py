"""The target behind an OpenAI-compatible server (vLLM, SGLang): it answers and scores as one in this process would."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from configs.errors import UserError
from decode.laws import Law
from decode.models import Loaded
from distill.logit_cache import Signal
from distill.rows import Row

RETRIES = 5  # of each request, with growing pauses: openai's own


@dataclass(frozen=True)
class Engine:
    """Servers that hold the same `model`, asked in turn; at most `concurrency` requests are under way."""

    urls: Sequence[str]
    model: str
    concurrency: int = 16
    timeout_s: float = 600.0

    @property
    def rows_at_once(self) -> int:
        """Rows to hand over at a time, so that the slowest of them keeps few others waiting."""
        return 4 * self.concurrency

    def check_target(self, target: Loaded) -> None:
        """Raises UserError for a target that servers do not serve as one text."""
        if target.model.config.is_encoder_decoder:
            raise UserError(f"--endpoint: {target.name} is an encoder–decoder model; leave it out, to run it here")

    def answer(
        self, prompts: Sequence[Sequence[int]], law: Law, max_new_tokens: int, seed: int, numbers: Sequence[int]
    ) -> list[list[int]]:
        """Token ids of an answer to each prompt's ids, exactly as the server made them.

        Each has a seed of its own, by its number in `numbers`.

        Raises UserError when the server cannot be reached, refuses, or gives no token ids.
        """
        how: dict[str, Any] = {"temperature": law.temperature, "top_p": law.top_p, "max_tokens": max_new_tokens}
        # All that a server would else take from the model's own generation config.
        plain = {"min_p": 0.0, "repetition_penalty": 1.0}
        beyond = {"return_token_ids": True, "skip_special_tokens": False, "top_k": law.top_k or -1} | plain
        how |= {"presence_penalty": 0.0, "frequency_penalty": 0.0}

        async def one(client: Any, number: int) -> list[int]:
            response = await client.completions.create(
                model=self.model, prompt=list(prompts[number]), seed=seed + numbers[number], extra_body=beyond, **how
            )
            ids = getattr(response.choices[0], "token_ids", None)
            if ids is None:
                raise UserError(f"{client.base_url}: answers without token_ids; it needs vLLM 0.10 or later")
            return [int(token) for token in ids]

        return asyncio.run(self._all(one, len(prompts)))

    def score(self, rows: Sequence[Row], top_k: int, taps: Sequence[int] = ()) -> tuple[Signal, Tensor]:
        """The `top_k` largest log-probabilities at every supervised place of the rows. vLLM only (prompt_logprobs).

        Raises UserError as `answer` does, also when the server allows fewer (vLLM: --max-logprobs), and for `taps`,
        which no server gives.
        """
        if taps:
            raise UserError("cache.taps: a server gives no hidden states; leave out the taps, or the endpoint")

        async def one(client: Any, number: int) -> list[dict[str, Any]]:
            response = await client.completions.create(
                model=self.model, prompt=rows[number].ids, max_tokens=1, temperature=0.0,
                extra_body={"prompt_logprobs": top_k},
            )  # fmt: skip
            places = getattr(response.choices[0], "prompt_logprobs", None)
            if places is None:
                raise UserError(f"{client.base_url}: gives no prompt_logprobs; scoring needs vLLM")
            marks = rows[number].is_answer
            return [place for place, mark in zip(places[1:], marks[1:], strict=True) if mark]

        places = [place for row in asyncio.run(self._all(one, len(rows))) for place in row]
        # A place lists the token that stands there too, also when it is not among the top.
        tops = [sorted(((-v["logprob"], int(token)) for token, v in place.items()))[:top_k] for place in places]
        ids = torch.tensor([[token for _, token in top] for top in tops])
        logp = torch.tensor([[-negative for negative, _ in top] for top in tops], dtype=torch.float32)
        tail = (1 - logp.double().exp().sum(-1)).clamp(min=torch.finfo(torch.float32).eps).float()  # never nothing
        return Signal(ids, logp, tail), torch.empty(sum(len(row.ids) for row in rows), 0)

    async def _all(self, one: Callable[[Any, int], Awaitable[Any]], count: int) -> list[Any]:
        import openai

        clients = [
            openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=RETRIES, timeout=self.timeout_s)
            for url in self.urls
        ]
        room = asyncio.Semaphore(self.concurrency)

        async def bounded(client: Any, number: int) -> Any:
            async with room:
                return await one(client, number)

        try:
            tasks = [bounded(client, number) for client, number in zip(cycle(clients), range(count), strict=False)]
            return await asyncio.gather(*tasks)
        except openai.APIStatusError as error:
            raise UserError(f"{error.request.url}: refused with {error.status_code} ({_said(error)})") from error
        except openai.APIConnectionError as error:
            raise UserError(f"{error.request.url}: no answer after {RETRIES} retries ({error})") from error
        finally:
            for client in clients:
                await client.close()


def _said(error: Any) -> str:
    """The server's own words on one line."""
    body = error.body if isinstance(error.body, dict) else {}
    return str(body.get("message") or (body.get("error") or {}).get("message") or error).splitlines()[0][:300]
