"""A measurement that is under way: what is done lies in a folder, so that a crash in its last part loses nothing."""

import shutil
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from configs.errors import UserError
from configs.files import read_json, write_json
from configs.reader import differing_keys
from eval.latency import Latency
from eval.live import PromptRun
from eval.run_file import append_run, read_runs


class Profiled(BaseModel):
    """The thread count that the measurement runs with, and its latency profile."""

    threads: int
    latency: Latency


class UnderWay:
    """What is done already. Raises UserError for a folder in which another measurement began."""

    def __init__(self, folder: Path, described: dict[str, Any]) -> None:
        self.folder = folder
        self._runs_file, self._profile_file = folder / "runs.jsonl", folder / "profile.json"
        self._settings_file, self._described = folder / "settings.json", described
        if self._settings_file.is_file():
            different = differing_keys(read_json(self._settings_file), described)
            if different:
                raise UserError(
                    f"{folder}: another measurement began here (different: {', '.join(different)}); "
                    "name another --out, or remove that folder"
                )
        self.runs = read_runs(self._runs_file)
        self.profiled = Profiled.model_validate(read_json(self._profile_file)) if self._profile_file.is_file() else None

    def note(self, threads: int, latency: Latency) -> None:
        """Keep the profile: what is measured after a crash is compared with the same one."""
        self.profiled = Profiled(threads=threads, latency=latency)
        write_json(self._settings_file, self._described)
        write_json(self._profile_file, self.profiled.model_dump(mode="json"))

    def add(self, run: PromptRun) -> None:
        """Keep a finished run."""
        append_run(self._runs_file, run)
        self.runs[run.prompt.id] = run

    def end(self) -> None:
        """The report is written: forget the parts."""
        shutil.rmtree(self.folder)
