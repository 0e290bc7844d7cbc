"""The sections of report.md on further measurements: contexts, prompt caching, batches, lookups, temperatures."""

from itertools import takewhile

from eval.markdown_table import speedup_cell, table
from eval.report import Report


def contexts(report: Report) -> str:
    rows = [
        [point.tokens, point.prefill_s, 1000 * point.plain_step_s, point.draft_cost, point.verify_cost, point.tau,
         point.speedup_decode, 1024 * point.kv_gib_per_1000_tokens]
        for point in report.contexts
    ]  # fmt: skip
    columns = ["context", "prefill, s", "plain step, ms", "draft step", "verification", "τ", "S_decode",
               "keys and values, MiB per 1,000"]  # fmt: skip
    return "## Long contexts\n\n" + table(columns, rows) if rows else ""


def prefix(report: Report) -> str:
    """Beside the speed-up, never in it."""
    found = report.prompt_cache
    if found is None or not found.reused_tokens:
        return ""
    row = [found.prompts, found.prompt_tokens, f"{found.hit_rate:.0%}", found.prefill_s, found.prefill_with_cache_s]
    columns = ["prompts", "prompt tokens", "hit rate", "prefill, s", "with a cache, s"]
    said = "What `decode.PromptCache` would save: these prompts in turn, each reading what none before began with. "
    return f"## Prompt caching\n\n{table(columns, [row])}\n\n{said}It is no part of the speed-ups above."


def batches(report: Report) -> str:
    rows = [
        [point.batch, point.prompts, point.plain_tokens_per_s, point.speculative_tokens_per_s, point.tau,
         point.speedup_decode]
        for point in report.batches
    ]  # fmt: skip
    if not rows:
        return ""
    columns = ["texts together", "prompts", "plain, tokens/s", "speculative, tokens/s", "τ", "S_decode"]
    points = sorted(report.batches, key=lambda point: -point.batch)
    losing = list(takewhile(lambda point: (point.speedup_decode or 2) < 1, points))
    said = f"\n\nFrom {losing[-1].batch} texts on speculation does not pay." if losing else ""
    return f"## Batches\n\n{table(columns, rows)}{said}"


def lookups(report: Report) -> str:
    """What training adds: the same prompts with drafts that need none."""
    rows = [[point.draft, point.prompts, point.tau, speedup_cell(point)] for point in report.lookups]
    if not rows:
        return ""
    said = (
        "`lookup` copies what followed the same tokens before, in prompt or answer; `lookup+draft` does so where this "
    )
    said += "text's rounds so far promise more of it than of the draft."
    return "## Drafts without training\n\n" + table(["draft", "prompts", "τ", "S_decode"], rows) + f"\n\n{said}"


def temperatures(report: Report) -> str:
    rows = [[f"{point.temperature:g}", point.prompts, point.tau, speedup_cell(point)] for point in report.temperatures]
    return "## Other temperatures\n\n" + table(["temperature", "prompts", "τ", "S_decode"], rows) if rows else ""
