#!/usr/bin/env python3
"""One vLLM run for scripts/engine_check.py, inside vLLM's own environment: a job as JSON in, what happened as JSON out.

usage: engine_vllm.py JOB.json OUT.json

Prompts go one at a time, so that its counters can be told apart: what each step emitted is known from the stream, and
what the last round accepted beyond the end of the answer from the counters.
"""

import json
import os
import sys
import time
from pathlib import Path

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind", HF_HUB_OFFLINE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
)  # fmt: skip

import vllm
from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    model = LLM(
        job["target"], dtype=job["dtype"], max_model_len=1024, max_num_seqs=1, enforce_eager=True,
        disable_log_stats=False, async_scheduling=False, speculative_config=job["speculation"],
    )  # fmt: skip
    answers = [decode(model, f"{i}", ids, job["max_tokens"]) for i, ids in enumerate(job["prompts"])]
    Path(sys.argv[2]).write_text(json.dumps({"version": vllm.__version__, "answers": answers}))


def decode(model: LLM, name: str, ids: list[int], max_tokens: int) -> dict:
    """One answer: its tokens, how many each step emitted, drafted tokens accepted in all, and seconds."""
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, output_kind=RequestOutputKind.DELTA)
    before, began, steps, tokens = accepted(model), time.perf_counter(), [], []
    model.llm_engine.add_request(name, {"prompt_token_ids": ids}, sampling)
    while model.llm_engine.has_unfinished_requests():
        for output in model.llm_engine.step():
            new = list(output.outputs[0].token_ids)
            tokens += new
            steps.append((len(new), time.perf_counter() - began))
    return {
        "tokens": tokens,
        "emitted": [count for count, _ in steps if count],
        "accepted": accepted(model) - before,
        "prefill_s": steps[0][1],
        "decode_s": steps[-1][1] - steps[0][1],
    }


def accepted(model: LLM) -> int:
    """Drafted tokens accepted so far, those beyond the end of an answer too."""
    return sum(int(m.value) for m in model.get_metrics() if m.name == "vllm:spec_decode_num_accepted_tokens")


if __name__ == "__main__":
    main()
