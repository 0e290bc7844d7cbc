"""What scripts/gpu_check.sh runs: it needs torch and transformers, and makes its own random models.

Where accelerate and DeepSpeed are installed it also takes ZeRO-3 steps, and on a GPU FSDP2 steps, in a process that
accelerate launches (`gpu_check.py sharded`).
"""

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
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


def lesson(dtype: torch.dtype) -> tuple[Teacher, DistillStep, dict]:
    """A teacher, the step of a draft that has drifted away from it, and one batch."""
    target, draft = models(torch.float32)
    target, draft = target.to(dtype), draft.train()
    with torch.no_grad():
        for weight in draft.parameters():
            weight += 0.02 * torch.randn_like(weight)
    ids = torch.randint(0, VOCABULARY, (4, 128 if ON_GPU else 16), device=DEVICE)
    predicts = torch.ones_like(ids, dtype=torch.bool)
    predicts[:, -1] = False
    return Teacher(target), DistillStep(LMStudent(draft), objective("forward_kl")), {"ids": ids, "predicts": predicts}


def distillation_step() -> dict:
    """Three steps on one batch, float32 weights under bfloat16 autocast: the loss is finite and falls."""
    teacher, step, batch = lesson(torch.bfloat16)
    optimizer = torch.optim.AdamW(step.parameters(), lr=1e-3)
    losses = []
    for _ in range(3):
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
            signal = {"hidden": teacher.hidden(**batch), "head": teacher.head_weight}
            loss = step(signal, **batch)[0] / batch["predicts"].sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return {
        "losses": losses,
        "distillation_ok": all(map(torch.isfinite, torch.tensor(losses))) and losses[2] < losses[0],
    }


def three_losses(step, optimizer, teacher: Teacher, batch: dict, backward=torch.Tensor.backward) -> list[float]:
    """Of three float32 steps on one batch."""
    losses = []
    for _ in range(3):
        signal = {"hidden": teacher.hidden(**batch), "head": teacher.head_weight}
        loss = step(signal, **batch)[0] / batch["predicts"].sum()
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def sharded_losses() -> None:
    """The same steps in float32, prepared as `distill` prepares them; prints the losses. Run under accelerate."""
    from train.parallel import launch_name, start_accelerator

    accelerator = start_accelerator(1, 1e9, 0, "no", None, Path())
    teacher, step, batch = lesson(torch.float32)
    prepared, optimizer = accelerator.prepare(step, torch.optim.AdamW(step.parameters(), lr=1e-3))
    losses = three_losses(prepared, optimizer, teacher, batch, accelerator.backward)
    print(json.dumps({"losses": losses, "launch": launch_name(accelerator)}))


def sharded_step() -> dict:
    """One process each of DeepSpeed ZeRO-3 and, on a GPU, FSDP2: their losses fall as those without them do."""
    if not all(importlib.util.find_spec(name) for name in ("accelerate", "deepspeed")):
        return {"sharded": "not tried: accelerate or deepspeed is not installed", "sharded_ok": None}
    teacher, step, batch = lesson(torch.float32)
    expected = three_losses(step, torch.optim.AdamW(step.parameters(), lr=1e-3), teacher, batch)
    found, right = {}, []
    for name in ("zero3", "fsdp2") if ON_GPU else ("zero3",):
        config = f"configs/accelerate/{name}.yaml"
        command = ["accelerate.commands.launch", "--config_file", config, "--num_processes", "1", __file__, "sharded"]
        done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True)
        lines = [line for line in done.stdout.splitlines() if line.startswith('{"losses"')]
        found[name] = json.loads(lines[-1]) if lines else done.stderr[-500:]
        close = bool(lines) and torch.allclose(torch.tensor(found[name]["losses"]), torch.tensor(expected), rtol=1e-2)
        right.append(close and found[name]["losses"][2] < found[name]["losses"][0])
    return {"sharded": found, "sharded_ok": all(right)}


def main() -> None:
    began = perf_counter()
    result = {
        "device": torch.cuda.get_device_name() if ON_GPU else "cpu", "torch": torch.__version__,
        "transformers": transformers.__version__,
    }  # fmt: skip
    for check in (check_equality, distillation_step, sharded_step, pace):
        result |= check()
    if ON_GPU:
        result["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    result["seconds"] = perf_counter() - began
    result["passed"] = bool(result["equality_ok"] and result["distillation_ok"] and result["sharded_ok"] is not False)
    print(json.dumps(result))
    sys.exit(0 if result["passed"] else 1)


if __name__ == "__main__":
    sharded_losses() if sys.argv[1:] == ["sharded"] else main()
