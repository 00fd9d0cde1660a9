"""Test the report on GPT-NeoX's model files, on a small checkout of its form."""

from tests.config.conftest import BASE
from tests.helpers.launch import call

MODEL, TRAINING = BASE.split("train_iters")


def test_every_model_file_is_combined_and_counted(tmp_path):
    files = {
        "gpt/configs/local_setup.yml": "save: a\nload: a\n",
        "gpt/configs/whole.yml": BASE,
        "gpt/configs/moe.yml": BASE + "moe_num_experts: 8\n",
        "gpt/configs/text.yml": BASE + "model_parallel_size: two\n",
        "gpt/configs/two.yml": BASE
        + "pipe_parallel_size: 0\nmodel-parallel-size: 2\nload: b\nnum_kv_heads: 2\n",
        "gpt/configs/llama/7B.yml": MODEL,
        "gpt/configs/llama/train_config.yml": "finetune: true\ntrain_iters" + TRAINING,
        "gpt/configs/evaluate.yml": BASE.replace("train_iters: 10", "train_iters: 0"),
        "gpt/other/no.yml": BASE,
        "kerple/kerple_configs/train.yml": BASE.replace(
            "pos_emb: kerple_log", "seq_length_val: 64"
        ),
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    roots = (tmp_path / "gpt", tmp_path / "kerple")
    lines = call("tools/check_neox_configs.py", *roots).splitlines()
    moe = "moe_num_experts: 8 is refused: mixtures of experts are not built; write "
    assert lines == [
        "accepted  gpt/configs/llama/7B.yml",
        "          with -o save=a-tuned",
        "refused   gpt/configs/moe.yml",
        f"          {moe}moe_num_experts: 1 instead",
        "refused   gpt/configs/text.yml",
        *lines[5:6],
        "accepted  gpt/configs/two.yml",
        "accepted  gpt/configs/whole.yml",
        "accepted  kerple/kerple_configs/train.yml",
        "4 of 6 model files accepted, 2 refused",
    ]
    said = call("tools/check_neox_configs.py", tmp_path, code=2)
    assert f"{tmp_path} has no folder configs or kerple_configs; name a checkout" in said
