"""Options of a short measurement."""

from eval.eval_options import EvalOptions

SWEEPS = {"sweep_lengths": (1, 2), "sweep_temperatures": (1.0,), "sweep_prompts": 5, "sweep_batches": (1, 3),
          "sweep_contexts": (40, 120)}  # fmt: skip


def settings_for(target, draft, **changes):
    values = {"target": str(target), "draft": str(draft), "max_prompts": 8, "max_new_tokens": 24, "threads": 1,
              "fp32_prompts": 3, "fp32_tokens": 12, "longest_draft": 4,
              "suite": str(changes.pop("suite", "suite"))}  # fmt: skip
    return EvalOptions(**(values | changes))
