#!/usr/bin/env python3
"""How far the predicted speed-up is from the measured one: over drafts, draft lengths and temperatures.

usage: scripts/bench_prediction.py DRAFT...     (drafts of models/smollm2-135m-instruct; an idle machine)

One process measures each draft's latency profile, another one each speed-up, which it predicts from that profile and
from replay on the plain answers. What is done is read back. Prints a table, and as its last line one JSON object.
"""

import json
import subprocess
import sys
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from eval.comparison import read_report  # noqa: E402

TARGET = "models/smollm2-135m-instruct"
OUT = Path("runs/bench-prediction")
LENGTHS, TEMPERATURES, PROMPTS = (1, 3), (0, 1), 16


def draftsmith(*arguments: object) -> None:
    subprocess.run([Path(sys.executable).parent / "draftsmith", *map(str, arguments)], check=True, cwd=ROOT)


def shown(value: float, interval: tuple[float, float]) -> str:
    return f"{value:.3f} [{interval[0]:.2f}, {interval[1]:.2f}]"


def main() -> None:
    errors = []
    table = Table("draft", "T", "γ", "τ replayed", "τ decoded", "predicted", "measured", "error")
    for draft in sys.argv[1:]:
        name = draft.replace("/", "-")
        for temperature in TEMPERATURES:
            profile = OUT / f"{name}-t{temperature}.json"
            if not (ROOT / profile).exists():
                draftsmith(
                    "profile", "--target", TARGET, "--draft", draft, "--temperature", temperature, "--longest", 9,
                    "--out", profile,
                )  # fmt: skip
            for length in LENGTHS:
                out = OUT / f"{name}-t{temperature}-{length}"
                draftsmith(
                    "eval", "--target", TARGET, "--draft", draft, "--out", out, "--latency-profile", profile,
                    "--temperature", temperature, "--num-draft-tokens", length, "--max-prompts", PROMPTS,
                    "--fp32-prompts", 2, "--law-samples", 0,
                )  # fmt: skip
                report = read_report(ROOT / out / "report.json")
                predicted, verdict = report.predicted_speedup, report.verdict
                errors.append(predicted / verdict.speedup_decode - 1)
                a = report.acceptance
                table.add_row(
                    draft, str(temperature), str(length), f"{a.tau_replayed:.2f}", shown(a.tau, a.tau_ci),
                    f"{predicted:.3f}", shown(verdict.speedup_decode, verdict.speedup_decode_ci), f"{errors[-1]:+.1%}",
                )  # fmt: skip
    Console(width=140).print(table)
    print(json.dumps({"median_abs_error": round(median(map(abs, errors)), 4), "runs": len(errors)}))


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main()
