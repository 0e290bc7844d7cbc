"""What scripts/gpu_check.sh runs: it needs torch and transformers, nothing else, and makes its own random models."""

import json
import sys
from dataclasses import replace
from time import perf_counter

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from decode.compiled import Compiled
from decode.drafts.lm import LMDraft
from decode.generation import Settings, device_clock, generate_ids
from decode.laws import Law
from distill.objectives import objective
from distill.step import DistillStep
from distill.students import LMStudent
from distill.teacher import Teacher

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
CLOCK = device_clock(DEVICE)
WIDTH, LAYERS, VOCABULARY, TOKENS = (1024, 12, 32_000, 96) if ON_GPU else (64, 4, 512, 24)
GAMMA, CONTEXT, PROMPT = 3, 256, list(range(5, 37))


def models(dtype: torch.dtype):
    """A random target and a draft of its first two layers."""
    torch.manual_seed(0)
    shape = {
        "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 3 * WIDTH, "num_attention_heads": 8,
        "num_key_value_heads": 4, "max_position_embeddings": 1024, "tie_word_embeddings": True, "eos_token_id": None,
    }  # fmt: skip
    target = LlamaForCausalLM(LlamaConfig(num_hidden_layers=LAYERS, **shape))
    draft = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **shape))
    draft.load_state_dict(target.state_dict(), strict=False)
    return target.to(DEVICE, dtype).eval(), draft.to(DEVICE, dtype).eval()


def compiled_pair(target, draft):
    """Graphs of the widths that decoding uses. On the CPU without code generation, which would take minutes."""
    backend = "inductor" if ON_GPU else "eager"
    return tuple(Compiled(model, CONTEXT, widest=GAMMA + 1, backend=backend) for model in (target, draft))


def check_equality() -> dict:
    """float32, with the noise of each place shared: every arm must draw the text that plain decoding draws."""
    target, draft = models(torch.float32)
    fast, fast_draft = compiled_pair(target, draft)
    wanted = found = 0
    for seed in range(4):
        settings = Settings(Law(0.8), TOKENS, GAMMA, seed=seed, seed_exact=True)
        plain = generate_ids(target, None, PROMPT, settings).token_ids
        for model, drafter in ((target, LMDraft(draft)), (fast, None), (fast, LMDraft(fast_draft))):
            other = generate_ids(model, drafter, PROMPT, settings).token_ids
            wanted += len(plain)
            found += next((i for i, (a, b) in enumerate(zip(plain, other, strict=True)) if a != b), len(plain))
    return {"tokens_compared": wanted, "tokens_equal": found, "equality_ok": found == wanted}


def pace() -> dict:
    """bfloat16: median milliseconds of a round of each arm, after a warm-up of all."""
    target, draft = models(torch.bfloat16)
    fast, fast_draft = compiled_pair(target, draft)
    settings = Settings(Law(0.0), TOKENS, GAMMA)
    arms = {
        "plain": (target, None), "compiled_plain": (fast, None),
        "speculative": (target, LMDraft(draft)), "compiled_speculative": (fast, LMDraft(fast_draft)),
    }  # fmt: skip
    result = {}
    began = CLOCK()
    for model, drafter in arms.values():
        for _ in range(2):
            generate_ids(model, drafter, PROMPT, replace(settings, max_new_tokens=3 * (GAMMA + 1)))
    result["warm_up_s"] = CLOCK() - began
    for name, (model, drafter) in arms.items():
        answer = generate_ids(model, drafter, PROMPT, settings)
        rounds = [done.round_s for done in answer.rounds if drafter is None or len(done.drafted) == GAMMA]
        result[f"{name}_round_ms"] = 1000 * sorted(rounds)[len(rounds) // 2]
    result["compiled_over_eager"] = result["plain_round_ms"] / result["compiled_plain_round_ms"]
    return result


def distillation_step() -> dict:
    """Three steps on one batch, float32 weights under bfloat16 autocast: the loss is finite and falls."""
    target, draft = models(torch.float32)
    target, draft = target.bfloat16(), draft.train()
    with torch.no_grad():
        for weight in draft.parameters():
            weight += 0.02 * torch.randn_like(weight)
    ids = torch.randint(0, VOCABULARY, (4, 128 if ON_GPU else 16), device=DEVICE)
    predicts = torch.ones_like(ids, dtype=torch.bool)
    predicts[:, -1] = False
    teacher, step = Teacher(target), DistillStep(LMStudent(draft), objective("forward_kl"))
    optimizer = torch.optim.AdamW(draft.parameters(), lr=1e-3)
    losses = []
    for _ in range(3):
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
            signal = {"hidden": teacher.hidden(ids, predicts), "head": teacher.head_weight}
            loss = step(signal, ids=ids, predicts=predicts)[0] / predicts.sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return {
        "losses": losses,
        "distillation_ok": all(map(torch.isfinite, torch.tensor(losses))) and losses[2] < losses[0],
    }


def main() -> None:
    began = perf_counter()
    result = {
        "device": torch.cuda.get_device_name() if ON_GPU else "cpu", "torch": torch.__version__,
        "transformers": transformers.__version__,
    }  # fmt: skip
    for check in (check_equality, distillation_step, pace):
        result |= check()
    if ON_GPU:
        result["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    result["seconds"] = perf_counter() - began
    result["passed"] = bool(result["equality_ok"] and result["distillation_ok"])
    print(json.dumps(result))
    sys.exit(0 if result["passed"] else 1)


if __name__ == "__main__":
    main()
