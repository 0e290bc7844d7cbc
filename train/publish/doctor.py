"""Lint any draft folder, ours or somebody else's: what an engine would refuse, and what it would silently misread."""

from configs.errors import UserError
from decode.models import describe_model, load_model
from train.publish.feature_checks import feature_checks, feature_config
from train.publish.fetch import local_folder
from train.publish.file_checks import file_checks, read_folder
from train.publish.findings import Finding
from train.publish.plain_checks import plain_checks
from train.publish.target_checks import parity_checks, target_checks


def examine(draft: str, target: str | None = None, trained: str | None = None) -> list[Finding]:
    """All findings about a draft: a folder or a Hub id[@revision]; with `target` also against it.

    `trained` is the draft that the folder was exported from: with the target, their logits are compared. Raises
    UserError when there is no such folder or target, and for `trained` without a target.
    """
    if trained and not target:
        raise UserError("--trained compares logits on the target's own text; name it with --target")
    folder, findings = read_folder(local_folder(draft))
    if folder is None:
        return findings
    findings += file_checks(folder)
    feature, wrong = feature_config(folder)
    findings += wrong
    if wrong:
        return findings
    findings += feature_checks(folder, feature) if feature else plain_checks(folder)
    if target is not None:
        loaded = load_model(target, "float32", "cpu") if trained else describe_model(target)
        findings += target_checks(folder, feature, loaded)
        if trained and not any(finding.is_fault for finding in findings):
            findings += parity_checks(folder, feature, loaded, trained)
    return findings
