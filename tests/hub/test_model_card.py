"""Test what makes an export ready to publish: the model card, and generation at any length."""

from __future__ import annotations

import json
import logging
import re
import shutil

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megatron.engine.checkpoint.saved_checkpoints import newest
from megatron.engine.open_run import open_run
from megatron.hub.export import UNLIMITED, export
from megatron.hub.importing import import_folder
from megatron.hub.model_card import model_card
from megatron.parallel.groups import build_groups
from tests.helpers.paths import FIXTURES
from tests.hub.test_export_hf import run_of
from tests.hub.test_round_trip import same


@pytest.fixture
def run(tmp_path):
    """Return the stored run, with results of `evaluate.py`."""
    folder = tmp_path / "run"
    shutil.copytree(FIXTURES / "checkpoint" / "run", folder)
    shutil.copyfile(FIXTURES / "checkpoint" / "config.yml", folder / "config.yml")
    (folder / "extrapolation.csv").write_text(
        "length,perplexity,code\n16,5.51234567,1e5\n32,9.1e-05,a.b\n"
    )
    (folder / "suite").mkdir()
    (folder / "suite" / "report.json").write_text('{"verdict": ["It uses 12 tokens."]}')
    return open_run(folder, groups=build_groups(torch.device("cpu")))


@pytest.fixture
def exported(run, tmp_path):
    (tmp_path / "out").mkdir()
    export(run, tmp_path / "out", "apache-2.0")
    return tmp_path / "out"


def test_the_card_has_what_the_run_knows(run, exported):
    text = (exported / "README.md").read_text()
    head = yaml.safe_load(text.split("---")[1])
    assert head["license"] == "apache-2.0" and head["library_name"] == "transformers"
    count = sum(weight.numel() for weight in run.model.parameters())
    trained = yaml.safe_load((FIXTURES / "checkpoint" / "config.yml").read_text())
    for part in (
        f"{count:,} parameters: ",
        "**kerple_log**: KERPLE's logarithmic distance kernel, b_h(d) = -p log(1 + a d)",
        f"Trained with texts of {run.config.model.seq_length} tokens. It reads any length.",
        f"- data_path: {trained['data_path']}",
        f"- steps: {run.saved.step} of {trained['train_iters']}, each of "
        f"{trained['train_batch_size']} texts",
        f"- optimizer: {{'type': 'adam', 'params': {{'lr': {trained['optimizer']['params']['lr']},",
        "| length | perplexity | code |\n|---|---|---|\n| 16 | 5.51235 | 1e5 |\n"
        "| 32 | 9.1e-05 | a.b |",
        "vocabulary. Trained by KERPLE-NeoX.\n",
        "- It uses 12 tokens.",
    ):
        assert part in text, part


def test_the_card_leaves_out_results_of_another_step(run):
    table, report = (run.saved.folder / name for name in ("extrapolation.csv", "suite/report.json"))
    for step, shown in ((run.saved.step, True), (run.saved.step + 1, False)):
        table.write_text(f"length,step\n16,{step}\n")
        report.write_text(json.dumps({"verdict": ["It is used."], "facts": {"step": step}}))
        card = model_card(run, own_class=True, licence="mit")
        assert ("## Perplexity by length" in card) == ("It is used." in card) == shown
    table.write_text("")
    assert "## Perplexity" not in model_card(run, own_class=True, licence="mit")


def test_the_code_of_the_card_runs(exported, capsys):
    [code] = re.findall(r"```python\n(.*?)```", (exported / "README.md").read_text(), re.DOTALL)
    exec(code.replace("max_new_tokens=100", "max_new_tokens=3"), {"DIR": exported})
    assert "Once upon a time" in capsys.readouterr().out


def test_cards_of_other_models(tmp_path):
    for pos_emb, part, longest in (
        ("rotary", "It reads at most 40 tokens.", None),  # in a class of transformers
        ("learned", "It reads at most 40 tokens.", None),
        ("sinusoidal", "It reads at most 40 tokens.", 40),
        ("alibi + sink", "# A GPT with alibi and sink\n", UNLIMITED),
    ):
        folder = tmp_path / pos_emb
        folder.mkdir()
        made = run_of(pos_emb=pos_emb)
        made.model.float()
        export(made, folder)
        text = (folder / "README.md").read_text()
        assert part in text and "license: unknown\n" in text and "recipe" not in text
        assert "Trained by" not in text  # the model was never saved: nothing is known of training
        own = (folder / "modeling_kerple.py").exists()
        assert text.count("trust_remote_code=True") == 2 * own  # the model's and the tokenizer's
        assert own == (longest is not None)
        if own:
            config = json.loads((folder / "config.json").read_text())
            assert config["max_position_embeddings"] == longest


@torch.no_grad()
def test_generation_goes_beyond_the_training_length_without_a_warning(run, exported, caplog):
    model = AutoModelForCausalLM.from_pretrained(exported, trust_remote_code=True)
    assert model.config.max_position_embeddings == UNLIMITED
    length = run.config.model.seq_length
    logging.getLogger("transformers").addHandler(caplog.handler)
    made = model.generate(
        torch.ones(1, 4, dtype=torch.int64), max_new_tokens=3 * length, eos_token_id=None,
        do_sample=False,
    )  # fmt: skip
    logging.getLogger("transformers").removeHandler(caplog.handler)
    assert made.shape[1] == 4 + 3 * length
    assert not [each for each in caplog.messages if "length" in each], caplog.messages


@pytest.mark.parametrize(("turn", "written"), [(set(), 256), ({7}, [7, 256])])
def test_an_export_ends_texts_where_generate_does(run, tmp_path, turn, written):
    """A chat model's end of turn is no end of a document, which pads texts."""
    run.tokenizer.ends = {256} | turn
    (tmp_path / "out").mkdir()
    export(run, tmp_path / "out")
    found = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert (found["eos_token_id"], found["pad_token_id"]) == (written, 256)


def test_an_older_export_and_a_model_saved_by_transformers_are_imported(run, exported, tmp_path):
    wanted = newest(tmp_path / "run").weights()
    model = AutoModelForCausalLM.from_pretrained(exported, trust_remote_code=True)
    model.save_pretrained(tmp_path / "saved")
    older = tmp_path / "older"
    shutil.copytree(exported, older)
    found = load_file(exported / "model.safetensors")
    names = {name: re.sub(r"^model\.(position_bias\.)?", "", name) for name in found}
    save_file({names[name]: x for name, x in found.items()}, older / "model.safetensors")
    assert "theta" in names.values()
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["kerple_neox"]
    for folder in ("older", "saved"):
        import_folder(tmp_path / folder, tmp_path / f"from {folder}")
        assert same(newest(tmp_path / f"from {folder}").weights(), wanted)
