"""Lint any draft folder, ours or somebody else's: what an engine would refuse, and what it would silently misread."""

from collections.abc import Callable, Iterable

from configs.errors import UserError
from decode.models import UNLOADABLE, describe_model, load_model
from train.publish.feature_checks import engines_of, feature_checks, feature_config
from train.publish.fetch import local_folder, unsafe_names
from train.publish.file_checks import file_checks, read_folder
from train.publish.findings import Finding, note
from train.publish.plain_checks import plain_checks
from train.publish.target_checks import parity_checks, target_checks

ODD = (*UNLOADABLE, RecursionError)  # what a config.json with anything in it can make of a check


def examine(
    draft: str, target: str | None = None, trained: str | None = None, engine: str | None = None
) -> list[Finding]:
    """All findings about a draft: a folder or a Hub id[@revision]; with `target` also against it.

    What only one engine stumbles over is a note, unless that is `engine` (vllm, sglang) or, by default, the one that
    the folder is written for. `trained` is the draft that the folder was exported from: with the target, their logits
    are compared. Raises UserError when there is no such folder or target, and for `trained` without a target.
    """
    if trained and not target:
        raise UserError("--trained compares logits on the target's own text; name it with --target")
    folder, findings = read_folder(local_folder(draft), unsafe_names(draft))
    if folder is None:
        return findings
    findings += _found(lambda: file_checks(folder))
    feature = None
    wrong: list[Finding]
    try:
        feature, wrong = feature_config(folder)
    except ODD as error:
        wrong = [_odd(error)]
    findings += wrong
    if wrong:
        return findings
    findings += _found(lambda: feature_checks(folder, feature) if feature else plain_checks(folder))
    if target is not None:
        loaded = load_model(target, "float32", "cpu") if trained else describe_model(target)
        findings += _found(lambda: target_checks(folder, feature, loaded))
        if trained and any(finding.is_fault for finding in findings):
            findings.append(note("logits were not compared", "There are faults to mend first", "ask again then"))
        elif trained:
            findings += _found(lambda: parity_checks(folder, feature, loaded, trained))
    engines = {engine} if engine else engines_of(feature) if feature else {"vllm", "sglang"}
    return [finding.judged_for(engines) for finding in findings]


def _found(checks: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """All that the checks find; a value that none of them can make sense of is a finding as well."""
    findings: list[Finding] = []
    try:
        for finding in checks():
            findings.append(finding)
    except ODD as error:
        findings.append(_odd(error))
    return findings


def _odd(error: BaseException) -> Finding:
    said = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return Finding(
        f"config.json or weights hold what none holds ({said})", "Loaders stop at it", "write the folder again"
    )
