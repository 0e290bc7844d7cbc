"""A small OpenAI-compatible server on loopback around a real tiny model: /v1/completions as distill.engine asks it."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch

from decode.generation import Settings, generate_ids
from decode.laws import Law
from decode.stops import Stops


class LocalEngine:
    """`fail_first` requests are answered with 503. `gives` says which of vLLM's extras are there."""

    def __init__(
        self, model, eos_ids=(), fail_first: int = 0, gives=("token_ids", "prompt_logprobs"), most_logprobs=64
    ):
        self.model, self.eos_ids, self.gives, self.most_logprobs = model, eos_ids, gives, most_logprobs
        self.fail_left, self.requests, self.lock = fail_first, [], threading.Lock()
        self.under_way = self.most_under_way = 0
        self.url = ""

    def complete(self, asked: dict) -> tuple[int, dict]:
        with self.lock:
            self.requests.append(asked)
            if self.fail_left > 0:
                self.fail_left -= 1
                return 503, {"error": {"message": "busy"}}
        if asked.get("prompt_logprobs", 0) > self.most_logprobs:
            message = f"Requested prompt logprobs of {asked['prompt_logprobs']}, which is greater than max allowed"
            return 400, {"error": {"message": message, "type": "BadRequestError", "code": 400}}
        choice: dict = {"index": 0, "text": "", "finish_reason": "stop", "logprobs": None}
        settings = Settings(
            Law(asked["temperature"], top_p=asked.get("top_p", 1.0)) if asked["temperature"] else Law(),
            asked["max_tokens"], stops=Stops(self.eos_ids), seed=asked.get("seed", 0),
        )  # fmt: skip
        if "token_ids" in self.gives:
            choice["token_ids"] = generate_ids(self.model, None, asked["prompt"], settings).token_ids
        if asked.get("prompt_logprobs") and "prompt_logprobs" in self.gives:
            choice["prompt_logprobs"] = self.prompt_logprobs(asked["prompt"], asked["prompt_logprobs"])
        return 200, {"id": "1", "object": "text_completion", "created": 0, "model": asked["model"], "choices": [choice]}

    @torch.no_grad()
    def prompt_logprobs(self, ids: list[int], count: int) -> list:
        """As vLLM gives them: none for the first place, else the top and the token that stands there."""
        logp = self.model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        places: list = [None]
        for place, token in zip(logp[:-1], ids[1:], strict=True):
            listed = {*place.topk(count).indices.tolist(), token}
            places.append({str(i): {"logprob": float(place[i]), "rank": 1, "decoded_token": "x"} for i in listed})
        return places


@contextmanager
def serving(engine: LocalEngine) -> Iterator[LocalEngine]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            with engine.lock:
                engine.under_way += 1
                engine.most_under_way = max(engine.most_under_way, engine.under_way)
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, body = engine.complete(asked)
            with engine.lock:
                engine.under_way -= 1
            content = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    engine.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield engine
    finally:
        server.shutdown()
        server.server_close()
