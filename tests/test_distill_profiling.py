"""Latency profiles in files of their own, used frozen."""

import json

import pytest

from configs.errors import UserError
from decode.laws import Law
from decode.length import read_costs
from decode.models import load_model
from distill.profiling import measure_profile, usual_shapes
from distill.shape import DraftSettings
from distill.verb_profile import profile
from eval.latency import Widths
from eval.profile_file import read_profile


@pytest.fixture(scope="module")
def target(tiny_target):
    return load_model(str(tiny_target))


SHAPES = {
    "eagle3, head 64": DraftSettings(kind="eagle3", vocabulary=64),
    "lm, 2 layers": DraftSettings(kind="lm", layers=(0, -1)),
}


@pytest.fixture(scope="module")
def found(target):
    return measure_profile(target, None, SHAPES, Law(0.0), 24, [1, 4], longest=6, threads=1, settings={"target": "t"})


def test_every_shape_width_and_batch_has_its_cost_with_an_interval(found):
    assert [shape.name for shape in found.shapes] == list(SHAPES)
    assert all(shape.c_ci[0] <= shape.c <= shape.c_ci[1] and shape.c > 0 for shape in found.shapes)
    assert list(found.batches) == [4]
    for latency in (found.latency, found.batches[4]):
        assert list(latency.verify_by_width) == [1, 2, 3, 4, 5, 6, 7]
        for width, cost in latency.verify_by_width.items():
            low, high = latency.intervals[f"v({width})"]
            assert low <= cost <= high
    assert found.batches[4].verify_by_width[1] == 1.0
    assert found.settings | {"context": 24, "threads": 1} == found.settings
    assert found.shapes[1].weights > found.shapes[0].weights / 4


def test_a_profile_in_a_file_is_what_auto_and_predictions_read(found, tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(found.model_dump_json())
    assert read_profile(path) == found
    costs = read_costs(path)
    assert (costs.c, costs.o, costs.v) == (found.latency.c, found.latency.o, found.latency.verify_by_width)
    path.write_text("{}")
    with pytest.raises(UserError, match="not a latency profile"):
        read_profile(path)


def test_rows_at_once_are_read_at_once(target):
    widths = Widths(target.model, [5, 6, 7], batch=4)
    assert widths.seconds(3) > 0
    assert widths._reader.keys_and_values()[0][0].shape[0] == 4
    assert widths._reader.length == 3


def test_the_usual_shapes_are_those_that_the_target_can_have(target):
    shapes = usual_shapes(target)
    assert "eagle3, whole head" in shapes
    assert not any("head 4096" in name for name in shapes)  # a vocabulary of 320 has no such head
    assert "lm, 2 layers, whole head" in shapes
    assert not any("4 layers" in name for name in shapes)  # the target has three


def test_a_shape_that_this_target_cannot_have_is_left_out_by_name(target, capsys):
    shapes = {"wide head": DraftSettings(kind="lm", vocabulary=99_999), "lm": DraftSettings(kind="lm")}
    found = measure_profile(target, None, shapes, Law(1.0), 16, [1], longest=4, threads=1, settings={})
    assert [shape.name for shape in found.shapes] == ["lm"]
    assert "wide head: left out" in capsys.readouterr().err
    with pytest.raises(UserError, match="no usual shape"):
        measure_profile(target, None, {"w": shapes["wide head"]}, Law(1.0), 16, [1], 4, 1, {})


def test_the_verb_writes_the_profile_of_a_draft(tiny_target, tiny_draft, tmp_path, capsys):
    out = tmp_path / "profile.json"
    profile(str(tiny_target), out, draft=str(tiny_draft), batch="1,2", context=16, longest=4, threads=1)
    content = json.loads(out.read_text())
    assert content["settings"]["draft"] == str(tiny_draft)
    assert list(content["batches"]) == ["2"]
    assert "plain step" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"--context 300: the target holds 256"):
        profile(str(tiny_target), out, draft=str(tiny_draft), context=300, threads=1)
    with pytest.raises(UserError, match=r"--batch 'x': expected whole numbers"):
        profile(str(tiny_target), out, batch="x")
