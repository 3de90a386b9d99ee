"""The example models read their fields by name, train, and compute what their papers say; and the
example that serves a model gives its scores."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runtime.__main__ import main
from runtime.data.batch import Field, Layout
from runtime.inference import open_model
from runtime.models.inputs import Embeddings, InputShape
from tests.tree import ROOT

EXAMPLES = ROOT / "examples"
MODELS = {"din": "DIN", "autoint": "AutoInt", "two_tower": "TwoTower"}

LAYOUT = Layout(
    fields=(
        Field(name="user"),
        Field(name="history", pooling="sequence", max_length=3, table="items"),
        Field(name="item", table="items"),
        Field(name="tags"),
    ),
    dense=("price",),
    tasks=("clicked",),
)


def class_of(name: str) -> type[torch.nn.Module]:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, MODELS[name])


@given(widths=st.lists(st.integers(1, 5), min_size=1, max_size=5), data=st.data())
def test_columns_hold_the_row_of_the_field(widths, data):
    """Fields have tables of different widths, and sequences stand among them."""
    kinds = data.draw(st.lists(st.booleans(), min_size=len(widths), max_size=len(widths)))
    fields = [
        Field(name=f"f{k}", table=f"t{k}", pooling="sequence" if is_sequence else "sum")
        for k, is_sequence in enumerate(kinds)
    ]
    shape = InputShape(
        layout=Layout(fields=tuple(fields)), dims={f"t{k}": w for k, w in enumerate(widths)}
    )
    rows = {f.name: torch.full((2, shape.dims[f.table]), float(k)) for k, f in enumerate(fields)}
    pooled = [rows[f.name] for f in fields if f.pooling != "sequence"]
    side_by_side = torch.cat([torch.zeros(2, 0), *pooled], dim=1)
    for field in fields:
        if field.pooling == "sequence":
            with pytest.raises(ValueError, match=f"{field.name} is a sequence"):
                shape.columns(field.name)
        else:
            assert torch.equal(side_by_side[:, shape.columns(field.name)], rows[field.name])


def test_a_field_that_is_not_there_is_named_with_the_nearest():
    shape = InputShape(layout=LAYOUT, dims={"rows": 4, "items": 4})
    with pytest.raises(ValueError, match="the data have no field 'itm'; did you mean item"):
        shape.columns("itm")


def test_din_weighs_each_event_by_the_candidate():
    """Held against loops over samples and events."""
    torch.manual_seed(0)
    shape = InputShape(layout=LAYOUT, dims={"rows": 4, "items": 4})
    model = class_of("din")(shape, [6])
    mask = torch.tensor([[True, True, False], [False, False, False]])
    events = torch.randn(2, 3, 4) * mask.unsqueeze(2)
    pooled, dense = torch.randn(2, 12), torch.randn(2, 1)
    logits = model(dense, Embeddings(pooled, {"history": events}, {"history": mask}))

    for sample in range(2):
        item = pooled[sample, 4:8]  # behind user
        interest = torch.zeros(4)
        for place in range(3):
            if mask[sample, place]:
                event = events[sample, place]
                pair = torch.cat([item, event, item - event, item * event])
                interest += model.activation(pair) * event
        expected = model.tower(torch.cat([pooled[sample], interest, dense[sample]]))
        assert torch.allclose(logits[sample], expected, atol=1e-6)


def test_two_towers_score_by_the_cosine_of_user_and_item():
    torch.manual_seed(0)
    shape = InputShape(layout=LAYOUT, dims={"rows": 4, "items": 4})
    model = class_of("two_tower")(shape, [6, 5])
    pooled = torch.randn(3, 12)
    logits = model(torch.zeros(3, 1), Embeddings(pooled, {}, {}))
    for sample in range(3):
        user, item = model.user(pooled[sample, :4]), model.item(pooled[sample, 4:])
        cosine = (user @ item / (user.norm() * item.norm())).item()
        assert logits[sample].item() == pytest.approx(cosine / 0.1, abs=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_it_trains_as_its_first_lines_say(name, tmp_path, monkeypatch):
    monkeypatch.chdir(EXAMPLES)
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
    command = f"--config run.toml --model.name {name}:{MODELS[name]}"
    assert command in (EXAMPLES / f"{name}.py").read_text()
    out = tmp_path / "run"
    arguments = f"train {command} --mode hybrid --tau 2 --ranks 2 --steps 40 --out {out}"
    assert main(arguments.split()) == 0
    summary = json.loads((Path(out) / "summary.json").read_text())
    assert summary["tasks"]["clicked"]["auc"] > 0.5


def test_the_server_of_the_examples_answers_as_predict_does(tmp_path):
    run, table = str(tmp_path / "run"), EXAMPLES / "clicks.csv"
    data = ["--data.name", str(EXAMPLES / "clicks.toml"), "--data.rows", "2000"]
    keep = ["--checkpoint-every", "end", "--test-rows", "200"]
    assert main(["train", *data, *keep, "--out", run]) == 0
    samples = pd.read_csv(table, nrows=5).drop(columns=["clicked"])
    expected = open_model(run).predict_frame(samples)[:, 0]

    command = [sys.executable, str(EXAMPLES / "serve.py"), run, "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            url = server.stdout.readline().strip()

            def ask(body: bytes) -> tuple[int, object]:
                try:
                    with urllib.request.urlopen(url, body) as answer:
                        return answer.status, json.load(answer)
                except urllib.error.HTTPError as refused:
                    return refused.code, json.load(refused)

            status, scores = ask(samples.to_json(orient="records").encode())
            assert status == 200
            assert [score["clicked"] for score in scores] == pytest.approx(list(expected))
            for wrong in (b"", b"[1", b"7", b'[{"user": 7}]'):
                status, said = ask(wrong)
                assert status == 400 and said["error"], wrong
            assert "item" in said["error"]
        finally:
            server.terminate()
