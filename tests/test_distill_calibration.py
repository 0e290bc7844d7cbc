"""The draft's own temperature: fitted where α is largest, stored in the draft, used when decoding."""

import json
from dataclasses import replace

import pytest
import torch
from conftest import make_llama

import decode
from decode.drafts.head import trim_head
from decode.drafts.lm import LMDraft
from decode.drafts.temperature import drafting_temperature
from decode.generation import Settings, generate_ids
from decode.laws import Law
from decode.models import load_model
from distill.build import build_lm_draft, save_draft
from distill.calibration import RATIOS, fit_temperatures, store_temperatures
from distill.rows import Row
from distill.teacher import Teacher


def test_a_draft_that_is_surer_than_the_target_is_to_draft_at_a_higher_temperature():
    """The draft is the target with a head scaled by 1.4: its best temperature is 1.4 times the target's, with α 1."""
    target, draft = (make_llama(90, layers=2, seed=0) for _ in range(2))
    draft.lm_head.weight = torch.nn.Parameter(1.4 * draft.lm_head.weight.detach())
    rows = [Row([5, 9, 30 + i, 7, 8, 41, 60], [False] * 3 + [True] * 4, i) for i in range(8)]
    fitted = fit_temperatures(LMDraft(draft, 90), Teacher(target), rows, Law(1.0), torch.device("cpu"))
    assert fitted == pytest.approx({t: 1.4 * t for t in fitted})


@pytest.mark.parametrize("law", [Law(1.0), Law(1.0, top_k=5), Law(1.0, top_p=0.8, vocabulary=80)], ids=str)
def test_what_is_fitted_is_the_best_of_all_ratios_over_the_whole_vocabulary(law):
    """A trimmed head against the very definition: α of whole laws, every ratio tried at every temperature."""
    target, draft = make_llama(90, layers=2, seed=0), make_llama(90, layers=1, seed=0)
    trim_head(draft, torch.arange(0, 90, 2))
    rows = [Row([5, 9, 30 + i, 7, 8, 41, 60], [False] * 3 + [True] * 4, i) for i in range(6)]
    fitted = fit_temperatures(LMDraft(draft, 90), Teacher(target), rows, law, torch.device("cpu"))
    for temperature, found in fitted.items():
        alpha = dict.fromkeys(RATIOS, 0.0)
        for row in rows:
            ids = torch.tensor([row.ids])
            with torch.no_grad():
                p_logits = target(ids).logits[:, 2:6]
                (q_logits,) = LMDraft(draft, 90).replayed(ids, None, torch.arange(2, 6), 1)
            p = replace(law, temperature=temperature)(p_logits)
            for ratio in RATIOS:
                q = replace(law, temperature=temperature * ratio)(q_logits)
                alpha[ratio] += float(torch.minimum(p, q).double().sum())
        assert alpha[min(RATIOS, key=lambda ratio: abs(found - ratio * temperature))] == pytest.approx(
            max(alpha.values())
        )


def test_between_fitted_temperatures_the_ratio_is_interpolated_and_beyond_them_kept():
    fitted = {0.5: 0.4, 1.0: 1.2}
    assert drafting_temperature({}, 0.7) == 0.7
    assert drafting_temperature(fitted, 0.5) == pytest.approx(0.4)
    assert drafting_temperature(fitted, 0.75) == pytest.approx(0.75 * (0.8 + 1.2) / 2)
    assert drafting_temperature(fitted, 2.0) == pytest.approx(2.4)
    assert drafting_temperature(fitted, 0.1) == pytest.approx(0.08)


def test_the_fitted_temperature_travels_in_the_draft_and_changes_what_it_draws_but_not_the_law(tiny_target, tmp_path):
    target = load_model(str(tiny_target))
    save_draft(build_lm_draft(target.model, (0, 1)), target, "lm", {}, tmp_path / "draft")
    store_temperatures({0.5: 0.8, 1.0: 1.6}, tmp_path / "draft")
    assert json.loads((tmp_path / "draft" / "config.json").read_text())["draftsmith"]["temperatures"]["1"] == 1.6
    draft = decode.load_draft(target, str(tmp_path / "draft"))
    assert draft.temperatures == {0.5: 0.8, 1.0: 1.6}

    def drawn(**how):
        answer = generate_ids(target.model, draft, [5, 9, 30], Settings(Law(1.0), 20, 2, seed=0, **how))
        return [done.q for done in answer.rounds if done.drafted]

    assert drawn() == drawn(draft_temperature=1.6)
    assert drawn() != drawn(draft_temperature=1.0)
    plain, drafted = (generate_ids(target.model, arm, [5], Settings(Law(0.0), 20, 2)) for arm in (None, draft))
    assert plain.token_ids == drafted.token_ids
