"""Test that clients of transformers take an export as it is, offline, with their own code.

Each test imports its client itself, or all processes of the whole run would wait seconds for them.
"""

from __future__ import annotations

import pytest
import torch
from torch.export import Dim, export
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from megatron.hub.columns import columns_of
from megatron.hub.export import export as write_export
from megatron.positional import bounds
from tests.helpers.hub import tokens, trained
from tests.hub.test_export_hf import run_of

QUIET = {"report_to": [], "use_cpu": True, "save_strategy": "no", "disable_tqdm": True}
TEXTS = ["import os\n", "def f(x):\n    return x\n", "for i in range(3):\n", "class A:\n    pass\n"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the folder of an export in float32, of the quickstart's width and depth."""
    run = run_of(pos_emb="kerple_log", num_layers=4, hidden_size=128, seq_length=64)
    with torch.no_grad():
        for each in run.model.parameters():
            each.mul_(0.3)
    run.model.float()
    folder = tmp_path_factory.mktemp("export") / "model"
    folder.mkdir()
    write_export(run, folder)
    return folder


@pytest.fixture
def model(folder):
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)


@pytest.fixture
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("given", [{"assistant_early_exit": 1}, {"inputs_embeds": None}], ids=str)
def test_modes_of_generation_give_the_greedy_tokens(model, given):
    ids = tokens(1, 9)
    greedy = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    wanted = model.generate(ids, **greedy)[:, 9:]
    if "inputs_embeds" in given:
        given, ids = {"inputs_embeds": model.get_input_embeddings()(ids)}, None
    for _ in range(2):  # an error of the first would leave another number of layers
        assert torch.equal(model.generate(ids, **greedy, **given)[:, -6:], wanted)


@torch.no_grad()
def test_the_backbone_and_the_classifier_are_loaded(folder, model):
    ids = tokens(1, 9)
    backbone = AutoModel.from_pretrained(folder, trust_remote_code=True)
    states = backbone(ids).last_hidden_state
    assert torch.equal(states, model.model(ids).last_hidden_state)
    assert torch.equal(model.get_output_embeddings()(states), model(ids).logits)
    kind = AutoModelForSequenceClassification
    classifier = kind.from_pretrained(folder, trust_remote_code=True, num_labels=3)
    assert classifier(ids).logits.shape == (1, 3)
    assert torch.equal(classifier.model(ids).last_hidden_state, states)


def test_trainer(model, tmp_path):
    before = model(tokens(8, 12), labels=tokens(8, 12)).loss.item()
    trainer = trained(model, tmp_path, learning_rate=1e-3, max_steps=8, save_strategy="steps")
    assert (
        trainer.evaluate([{"input_ids": x, "labels": x} for x in tokens(8, 12)])["eval_loss"]
        < before
    )
    trainer.save_model(str(tmp_path / "tuned"))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned", trust_remote_code=True)
    assert torch.equal(again(tokens(1, 9)).logits, model.eval()(tokens(1, 9)).logits)


def test_trainer_smooths_the_labels_of_the_next_tokens(model, tmp_path):
    data = [{"input_ids": x, "labels": x} for x in tokens(4, 12)]
    losses = [
        trainer_of(model, tmp_path, data, label_smoothing_factor=factor).evaluate()["eval_loss"]
        for factor in (0.0, 1e-6)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_trainer_trains_and_measures_a_classifier(folder, tmp_path):
    kind = AutoModelForSequenceClassification
    model = kind.from_pretrained(folder, trust_remote_code=True, num_labels=3)
    data = [{"input_ids": x, "labels": i % 3} for i, x in enumerate(tokens(6, 9))]
    before = model.score.weight.detach().clone()
    trainer = trainer_of(model, tmp_path, data, max_steps=2, gradient_accumulation_steps=2)
    trainer.train()
    assert not torch.equal(model.score.weight, before)
    predicted = trainer.predict(data)
    logits, labels = torch.tensor(predicted.predictions), torch.tensor(predicted.label_ids)
    wanted = torch.nn.functional.cross_entropy(logits, labels).item()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(wanted, rel=1e-4)


def trainer_of(model, folder, data, **options):
    from transformers import Trainer, TrainingArguments

    given = QUIET | {"per_device_train_batch_size": 3, "per_device_eval_batch_size": 2} | options
    settings = TrainingArguments(str(folder), **given)
    return Trainer(model, settings, train_dataset=data, eval_dataset=data)


@torch.no_grad()
def test_lora_merged_into_all_linear_layers_gives_the_same_logits(model):
    from peft import LoraConfig, get_peft_model

    tuned = get_peft_model(model, LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
    found = {name.split(".lora_B")[0].rpartition(".")[2] for name, _ in tuned.named_parameters()}
    assert found >= {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"}
    plain = tuned(tokens(2, 30)).logits
    for name, each in tuned.named_parameters():
        if "lora_B" in name:
            each.normal_(std=0.1)
    wanted = tuned(tokens(2, 30)).logits
    assert (wanted - plain).abs().max() > 0.1
    merged = tuned.merge_and_unload()
    torch.testing.assert_close(merged(tokens(2, 30)).logits, wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"packing": True, "max_length": 32}], ids=str)
def test_sft(model, tokenizer, tmp_path, options):
    """With the defaults, which checkpoint activations, and with several documents in a row."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    tokenizer.split_special_tokens = False  # TRL writes the end of a document as text
    settings = SFTConfig(str(tmp_path), max_steps=3, learning_rate=1e-2, **QUIET, **options)
    before = model.model.position_bias.theta.detach().clone()
    trainer = SFTTrainer(
        model,
        settings,
        train_dataset=Dataset.from_dict({"text": TEXTS * 4}),
        processing_class=tokenizer,
    )
    ends = [row["input_ids"].count(tokenizer.eos_token_id) for row in trainer.train_dataset]
    assert sum(ends) == 4 * len(TEXTS)
    assert trainer.train().training_loss > 0
    theta, pos = model.model.position_bias.theta, model.model.position_bias.pos
    low, high = bounds(pos.parameters)
    assert not torch.equal(theta, before) and ((theta >= low) & (theta <= high)).all()


def test_dpo(folder, model, tokenizer, tmp_path):
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    tokenizer.split_special_tokens = False
    pairs = {"prompt": TEXTS, "chosen": ["a = 1"] * 4, "rejected": ["b c d"] * 4}
    reference = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    trainer = DPOTrainer(
        model,
        reference,
        DPOConfig(str(tmp_path), max_steps=2, learning_rate=1e-3, **QUIET),
        train_dataset=Dataset.from_dict(pairs),
        processing_class=tokenizer,
    )
    assert trainer.train().training_loss > 0


@torch.no_grad()
def test_generation(folder, model, tokenizer):
    """A pipeline, beams, an assistant and a static cache give what greedy generation gives."""
    from transformers import pipeline

    prompt = tokenizer(["import os, "], return_tensors="pt")
    options = {"max_new_tokens": 12, "do_sample": False}
    greedy = model.generate(**prompt, **options)
    [[made]] = pipeline("text-generation", model=model, tokenizer=tokenizer)(
        ["import os, "], **options
    )
    assert made["generated_text"] == tokenizer.decode(greedy[0], skip_special_tokens=True)
    assistant = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert torch.equal(model.generate(**prompt, **options, assistant_model=assistant), greedy)
    static = model.generate(**prompt, **options, cache_implementation="static")
    assert torch.equal(static, greedy)
    end = {"stop_strings": [tokenizer.decode(greedy[0, -8:-6])], "tokenizer": tokenizer}
    stopped = model.generate(**prompt, **options, **end)
    assert stopped.shape[1] < greedy.shape[1] and torch.equal(
        stopped, greedy[:, : stopped.shape[1]]
    )
    several = {"num_beams": 3, "num_return_sequences": 3, "return_dict_in_generate": True}
    beams = model.generate(**prompt, **options, **several, output_scores=True)
    logits = model(beams.sequences).logits[0, prompt["input_ids"].shape[1] - 1 : -1]
    new = beams.sequences[0, prompt["input_ids"].shape[1] :, None]
    score = logits.log_softmax(-1).gather(1, new).mean()
    torch.testing.assert_close(beams.sequences_scores[0], score, rtol=0, atol=1e-3)


@torch.no_grad()
def test_accelerate_moves_the_arguments_of_layers(model):
    """As `device_map` does with layers on several devices."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    ids, mask = tokens(2, 9), torch.ones(2, 9, dtype=torch.int64)
    mask[1, :3] = 0
    wanted = model(ids, attention_mask=mask).logits
    for layer in model.model.layers:
        add_hook_to_module(layer, AlignDevicesHook("cpu", io_same_device=True))
    assert torch.equal(model(ids, attention_mask=mask).logits, wanted)
    at = columns_of(torch.zeros(2, 9, 4), mask, None, None).to(torch.device("meta"))
    assert at.columns_T.is_meta and at.positions_BT.is_meta and at.first_BT.is_meta


@torch.no_grad()
def test_torch_export(model):
    """The graph serves texts of any length."""
    ids = tokens(2, 140)
    lengths = {"input_ids": {1: Dim("length", min=2, max=1024)}, "use_cache": None}
    program = export(model, (tokens(2, 20),), {"use_cache": False}, dynamic_shapes=lengths)
    found = program.module()(ids, use_cache=False).logits
    torch.testing.assert_close(found, model(ids).logits, rtol=0, atol=1e-4)
    given = {"input_ids": ids, "use_cache": False}
    places = torch.arange(140)[None].expand(2, -1)
    packed = places % 50  # documents of 50, 50 and 40 tokens
    program = export(model, (), given | {"position_ids": places}).module()
    for each in (places, packed):
        wanted = model(**given, position_ids=each).logits
        found = program(**given, position_ids=each).logits
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)
    assert not torch.allclose(wanted, model(ids).logits, atol=0.01)


def test_a_compiled_model_computes_the_same(model):
    ids = tokens(2, 140)
    wanted = model(ids, labels=ids)
    wanted.loss.backward()
    gradients = [x.grad for x in model.parameters()]
    model.zero_grad()
    found = torch.compile(model, backend="aot_eager")(ids, labels=ids)
    found.loss.backward()
    torch.testing.assert_close(found.logits, wanted.logits, rtol=0, atol=1e-4)
    for parameter, each in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, each, rtol=1e-3, atol=1e-5)
