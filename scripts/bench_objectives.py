#!/usr/bin/env python3
"""Peak memory and time of forward KL and its gradients from hidden states, with two heads over V ids.

usage: scripts/bench_objectives.py [--tokens 4096] [--width 576] [--vocabularies 49152,151936]

Each variant runs in a process of its own, float32: `naive` makes all logits of both models, as plain PyTorch does;
`ours` is distill.step.chunked_sum; `trl` and `liger` are the chunked losses of TRL and Liger where they are installed
(pip install trl liger-kernel) and run on this device. Peak is resident memory (or the accelerator's) above the inputs;
time is that of a second pass. The last line is one JSON object; `peak_over_naive` and
`time_over_naive` are of ours at the largest vocabulary.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from time import perf_counter

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

REPETITIONS = 2


def naive(hidden, head, p_hidden, p_head):
    with torch.no_grad():
        log_p = (p_hidden @ p_head.T).log_softmax(-1)
    log_q = (hidden @ head.T).log_softmax(-1)
    return nn.functional.kl_div(log_q, log_p, reduction="sum", log_target=True)


def ours(hidden, head, p_hidden, p_head):
    from distill.objectives import forward_kl, online_columns
    from distill.step import chunked_sum

    def loss(places, q_logits):
        columns = online_columns(p_hidden[places] @ p_head.T, q_logits, None)
        return forward_kl(columns.log_p, columns.log_q), columns.alpha()

    return chunked_sum(loss, hidden.unsqueeze(0), head, chunk_tokens=128)[0]


def trl(hidden, head, p_hidden, p_head):
    from trl.trainer.distillation_trainer import _chunked_divergence_loss

    everywhere = torch.ones(1, len(hidden))
    arguments = hidden.unsqueeze(0), p_hidden.unsqueeze(0), head, p_head, everywhere
    return _chunked_divergence_loss(*arguments, beta=0.0, num_items_in_batch=1)[0]


def liger(hidden, head, p_hidden, p_head):
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    fused = LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=0.0, compiled=False)
    nobody = torch.zeros(len(hidden), dtype=torch.long)
    return fused(hidden, head, p_hidden, p_head, nobody)


VARIANTS = {"naive": naive, "ours": ours, "trl": trl, "liger": liger}


class Peak:
    """Peak memory in GiB since it was made: the accelerator's, or resident, which Linux lets one reset."""

    def __init__(self, device: str) -> None:
        self.device = device
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self.start = torch.cuda.memory_allocated() / 2**30
        else:
            Path("/proc/self/clear_refs").write_text("5")
            self.start = self._resident("VmRSS")

    def gib(self) -> float:
        peak = torch.cuda.max_memory_allocated() / 2**30 if self.device == "cuda" else self._resident("VmHWM")
        return peak - self.start

    def _resident(self, name: str) -> float:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) / 2**20
        raise RuntimeError(name)


def run_one(name: str, tokens: int, width: int, vocabulary: int) -> dict:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    scale = width**-0.5
    hidden, p_hidden = (torch.randn(tokens, width, device=device) for _ in range(2))
    head, p_head = (scale * torch.randn(vocabulary, width, device=device) for _ in range(2))
    hidden.requires_grad_()
    head.requires_grad_()
    with torch.device(device):
        VARIANTS[name](hidden[:64], head, p_hidden[:64], p_head).backward()  # imports and first calls are not measured
    hidden.grad = head.grad = None
    seconds, peak = [], Peak(device)
    for _ in range(REPETITIONS):
        began = perf_counter()
        with torch.device(device):
            loss = VARIANTS[name](hidden, head, p_hidden, p_head)
        loss.backward()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(perf_counter() - began)
        found = {"loss": float(loss.detach()), "grad_norm": float(hidden.grad.norm())}
        hidden.grad = head.grad = None
        del loss
    return {"peak_gib": peak.gib(), "seconds": seconds[-1], **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--width", type=int, default=576)
    parser.add_argument("--vocabularies", default="49152,151936")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        name, vocabulary = given.one.split(":")
        print(json.dumps(run_one(name, given.tokens, given.width, int(vocabulary))))
        return
    table = Table("V", "variant", "peak, GiB", "÷ naive", "seconds", "÷ naive", "loss")
    found: dict = {}
    sizes = [int(size) for size in given.vocabularies.split(",")]
    for size in sizes:
        for name in VARIANTS:
            command = [sys.executable, __file__, "--one", f"{name}:{size}", "--tokens", str(given.tokens)]
            done = subprocess.run([*command, "--width", str(given.width)], capture_output=True, text=True)
            if done.returncode:
                last = (done.stderr.strip() or "killed: not enough memory?").splitlines()[-1]
                table.add_row(f"{size:,}", name, "does not run here: " + last[:60])
                continue
            one = found[name, size] = json.loads(done.stdout.splitlines()[-1])
            base = found.get(("naive", size))
            ratios = [f"{one[key] / base[key]:.3f}" if base else "–" for key in ("peak_gib", "seconds")]
            table.add_row(
                f"{size:,}", name, f"{one['peak_gib']:.2f}", ratios[0], f"{one['seconds']:.1f}", ratios[1],
                f"{one['loss']:.6g}",
            )  # fmt: skip
    Console().print(table)
    best, base = found["ours", sizes[-1]], found.get(("naive", sizes[-1]))
    result = {
        "peak_over_naive": base and best["peak_gib"] / base["peak_gib"],
        "time_over_naive": base and best["seconds"] / base["seconds"],
        "loss_difference": base and abs(best["loss"] / base["loss"] - 1),
        "tokens": given.tokens, "vocabulary": sizes[-1],
    }  # fmt: skip
    print(json.dumps(result))


if __name__ == "__main__":
    main()
