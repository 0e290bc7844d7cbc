#!/usr/bin/env python3
"""Kill `data`, `data cache` and `distill` with SIGKILL at random moments; they must go on and lose no finished work.

usage: scripts/soak.py [--kills 20] [--seed 0] [--processes 1] [--out runs/soak]

A small random target that it makes itself. A run that nobody kills comes first; then the same run is killed
`--kills` times in all: at random moments of each stage, and a part of the kills of training while a checkpoint is
being written. Every restart must keep what was whole before: rows of answers, shards of the cache, the newest whole
checkpoint, from which training must say that it goes on. At the end the killed run must have the answers, the losses
and the draft's weights of the other, bit for bit. The last line is one JSON object: `kills`, `in_checkpoint`, `lost`
(0 when it passes), `equal`. Exit code 1 when something was lost, or fewer kills than asked for hit a run.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import ClassVar

from rich.console import Console

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

CONSOLE = Console(stderr=True)
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


class Stage:
    """The commands of the loop, and the finished work that they leave behind."""

    WHOLE: ClassVar = {"data": 120, "cache": 60, "train": 60}  # answers, shards (or a few more), steps

    def __init__(self, folder: Path, processes: int) -> None:
        self.folder = folder
        shared = [
            f"target={folder.parent / 'target'}", f"output={folder / 'run'}",
            f"data.answers={folder / 'answers.jsonl'}",
            f"data.prompts={folder.parent / 'prompts.jsonl'}", "data.max_new_tokens=40", "data.batch_rows=8",
            "data.held_out_rows=8", f"cache.folder={folder / 'cache'}", "cache.shard_tokens=64", "cache.taps=[0,1,2]",
            "draft.kind=eagle3", "draft.taps=[0,1,2]", "train.steps=60", "train.batch_rows=8", "train.micro_rows=4",
            "train.measure_every=20", "train.save_every=2", "train.keep_checkpoints=2",
        ]  # fmt: skip
        draftsmith = str(Path(sys.executable).parent / "draftsmith")
        launch = ["--launch", "ddp", "--num-processes", str(processes)] if processes > 1 else []
        self.commands = {
            "data": [draftsmith, "data", *shared],
            "cache": [draftsmith, "data", "cache", *shared],
            "train": [draftsmith, "distill", *launch, *shared],
        }

    def done(self, name: str) -> bool:
        """Whether the stage has ended."""
        if name == "data":
            return len(self._answers()) == self.WHOLE["data"]
        marks = {"cache": self.folder / "cache" / "manifest.json", "train": self.folder / "run" / "done.json"}
        return marks[name].is_file()

    def finished_work(self, name: str) -> list[str]:
        """What a restart must not lose, in the order in which it came to be."""
        if name == "data":
            return self._answers()
        if name == "cache":
            return sorted(path.name for path in (self.folder / "cache").glob("shard-*.safetensors"))
        newest = sorted(path.name for path in self._checkpoints() if (path / "progress.json").is_file())[-1:]
        return [f"{int(newest[0].removeprefix('step-'))}"] if newest else []

    def amount(self, name: str) -> int:
        """How much of it there is: answers, shards or steps."""
        found = self.finished_work(name)
        return int(found[0]) if name == "train" and found else len(found)

    def lost(self, name: str, before: list[str]) -> bool:
        """Whether what there was before a restart is there no more."""
        if self.done(name):
            return False
        now = self.finished_work(name)
        if name == "train":
            return bool(before) and (not now or int(now[0]) < int(before[0]))
        return now[: len(before)] != before

    def being_written(self) -> set[str]:
        """Checkpoints under their temporary names; those of earlier kills stay until their step comes again."""
        return {path.name for path in (self.folder / "run" / "checkpoints").glob("*.tmp")}

    def _answers(self) -> list[str]:
        path = self.folder / "answers.jsonl"
        return path.read_text(encoding="utf-8").split("\n")[:-1] if path.is_file() else []

    def _checkpoints(self) -> list[Path]:
        folder = self.folder / "run" / "checkpoints"
        return [path for path in folder.glob("step-*") if path.suffix != ".tmp"]


def make_inputs(folder: Path) -> None:
    """A random target and 120 prompts."""
    from conftest import make_llama, make_tokenizer

    folder.mkdir(parents=True)
    tokenizer = make_tokenizer()
    make_llama(len(tokenizer), layers=3, seed=0).save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    prompts = [{"prompt": f"Which pump measures list {i}?"} for i in range(120)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts), encoding="utf-8")


def start(command: list[str], log: Path) -> subprocess.Popen:
    with log.open("a") as stream:
        return subprocess.Popen(
            command, cwd=ROOT, env=ENVIRONMENT, stdout=stream, stderr=stream, start_new_session=True
        )


def kill(process: subprocess.Popen) -> None:
    """The process and its children at once, as a machine that goes down does."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def wait_for(process: subprocess.Popen, until) -> bool:
    """Whether `until` came true before the process ended."""
    while process.poll() is None:
        if until():
            return True
        time.sleep(0.001)
    return False


def killed_run(stage: Stage, kills: int, chance: random.Random, log: Path) -> dict:
    """Run all stages to their end, with `kills` kills in between, each a little further on than the one before."""
    result = {"kills": 0, "in_checkpoint": 0, "lost": 0}
    planned = {"data": kills // 4, "cache": kills // 4}
    planned["train"] = kills - sum(planned.values())
    for name, command in stage.commands.items():
        for number in range(planned[name]):
            before, stale, said = stage.finished_work(name), stage.being_written(), log.stat().st_size
            further = stage.amount(name) + chance.uniform(0.1, 0.6) * stage.WHOLE[name] / planned[name]
            process = start(command, log)
            reached = wait_for(process, lambda name=name, further=further: stage.amount(name) >= further)
            if name == "train" and number % 3 == 0:
                reached = wait_for(process, lambda stale=stale: stage.being_written() - stale)
            else:
                time.sleep(chance.uniform(0, 0.02))
            if process.poll() is not None:
                raise SystemExit(f"{name} ended with {process.returncode} before it was killed; see {log}")
            kill(process)
            result["kills"] += reached
            result["in_checkpoint"] += bool(stage.being_written() - stale)
            lost = stage.lost(name, before) or started_elsewhere(name, before, log, said)
            result["lost"] += lost
            CONSOLE.print(f"{name} {number}: at {stage.amount(name)} of {stage.WHOLE[name]}{', LOST' if lost else ''}")
        finish(stage, name, command, log)
    return result


def started_elsewhere(name: str, before: list[str], log: Path, said: int) -> bool:
    """Whether training that came as far as its first step did not go on from the newest whole checkpoint."""
    with log.open(errors="replace") as stream:
        stream.seek(said)
        text = stream.read()
    has_begun = "step " in text or "resuming" in text
    return name == "train" and bool(before) and has_begun and f"resuming after step {before[0]}\n" not in text


def finish(stage: Stage, name: str, command: list[str], log: Path) -> None:
    """Run a stage to its end."""
    if start(command, log).wait() or not stage.done(name):
        raise SystemExit(f"{name} did not end well; see {log}")


def same(one: Path, other: Path) -> bool:
    """Whether two runs have the same answers, losses and weights."""

    def losses(folder: Path) -> list[float]:
        rows = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
        return [row["loss"] for row in rows if "loss" in row]

    files = ("answers.jsonl", "run/draft/model.safetensors")
    return losses(one) == losses(other) and all((one / f).read_bytes() == (other / f).read_bytes() for f in files)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1, help="of training: 2 are launched with DDP")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "soak")
    given = parser.parse_args()
    out, chance = given.out.resolve(), random.Random(given.seed)
    shutil.rmtree(out, ignore_errors=True)
    make_inputs(out)
    for name in ("whole", "killed"):
        (out / name).mkdir()
    whole, stage = Stage(out / "whole", given.processes), Stage(out / "killed", given.processes)
    for name, command in whole.commands.items():
        began = time.time()
        finish(whole, name, command, out / "whole.log")
        CONSOLE.print(f"{name}: {time.time() - began:.1f} s when nobody kills it")
    (out / "killed.log").touch()
    result = killed_run(stage, given.kills, chance, out / "killed.log")
    result["equal"] = same(out / "whole", out / "killed")
    print(json.dumps(result))
    sys.exit(0 if result["equal"] and not result["lost"] and result["kills"] == given.kills else 1)


if __name__ == "__main__":
    main()
