"""Test Muon: which parameters it trains, its steps against torch's own, and jobs in each layout."""

from types import SimpleNamespace

import pytest
import torch

from megatron.config.sections.training import OptimizerConfig
from megatron.engine.checkpoint.saved_checkpoints import newest
from megatron.engine.training import muon
from megatron.engine.training.muon import MuonWithAdamW, orthogonal
from megatron.engine.training.optimizer import parameter_groups
from megatron.model import GPT
from megatron.model.heads import by_key_heads, divide_heads
from tests.engine.training.test_optimizer_groups import model, names
from tests.helpers.jobs import cell, digest, rows, train_run, write_shards
from tests.helpers.launch import run_ranks

SHAPES = ((6, 4), (3, 9), (5, 5))
SETTINGS = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-6, "momentum": 0.9, "split_fused": True}

MUON = OptimizerConfig(type="muon", lr=0.1, weight_decay=0.1)


def test_muon_trains_the_matrices_of_the_blocks():
    gpt: GPT = model()
    *others, hidden = parameter_groups(gpt, MUON)
    kinds = (
        "attention.query_key_value",
        "attention.dense",
        "mlp.dense_h_to_4h",
        "mlp.dense_4h_to_h",
    )
    assert names(gpt, hidden) == {f"layers.0.{kind}.weight" for kind in kinds}
    assert [group["muon"] for group in (*others, hidden)] == [False, False, True]
    assert {"embedding.word_embeddings.weight", "output.weight"} == names(gpt, others[0])
    stage = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.Linear(4, 4)])})
    stage["layers"].append(torch.nn.LayerNorm(4))  # a stage of a pipeline: nothing but blocks
    decayed, exempt, hidden = parameter_groups(stage, MUON)
    assert [len(group["params"]) for group in (decayed, exempt, hidden)] == [1, 2, 1]
    assert decayed["weight_decay"] == 0.0


def groups_of(matrices, other):
    common = {"weight_decay": 0.2}
    return [
        {"params": [other], "muon": False, "name": "decayed", **common},
        {"params": matrices, "muon": True, "name": "hidden matrices", **common},
    ]


def random_gradients(steps=3):
    generator = torch.Generator().manual_seed(0)
    return [[torch.randn(s, generator=generator) for s in (*SHAPES, (7,))] for _ in range(steps)]


def parameters():
    return [torch.nn.Parameter(torch.full(shape, 0.5)) for shape in (*SHAPES, (7,))]


def torchs_own(steps=3):
    """Return the parameters after some steps of torch's Muon and AdamW."""
    *matrices, other = parameters()
    muon = torch.optim.Muon(
        matrices, lr=0.1, weight_decay=0.2, momentum=0.9, adjust_lr_fn="match_rms_adamw"
    )
    adamw = torch.optim.AdamW([other], lr=0.1, weight_decay=0.2, betas=(0.8, 0.9), eps=1e-6)
    for gradients in random_gradients(steps):
        for parameter, gradient in zip((*matrices, other), gradients, strict=True):
            parameter.grad = gradient
        muon.step()
        adamw.step()
    return [*matrices, other]


def test_orthogonal_maps_each_singular_value_by_the_polynomial():
    left, _ = torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64))
    right, _ = torch.linalg.qr(torch.randn(9, 9, dtype=torch.float64))
    values = torch.tensor([3.0, 1.0, 0.5, 0.1, 0.02], dtype=torch.float64)
    mapped = values / values.norm()
    for _ in range(5):
        mapped = 3.4445 * mapped - 4.7750 * mapped**3 + 2.0315 * mapped**5
    matrix, expected = (left @ each.diag() @ right[:5] for each in (values, mapped))
    torch.testing.assert_close(orthogonal(matrix), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(orthogonal(matrix.T), expected.T, rtol=0, atol=1e-12)
    assert mapped.min() > 0.5 and mapped.max() < 1.5


@pytest.fixture
def in_bf16(monkeypatch):
    """Compute in bf16, as torch's Muon does everywhere."""
    monkeypatch.setattr(muon, "CPU_DTYPE", torch.bfloat16)


@pytest.mark.usefixtures("in_bf16")
def test_steps_on_whole_matrices_are_torchs_own_and_resume():
    *matrices, other = parameters()
    alone = SimpleNamespace(replica_rank=0, replica_size=1)
    optimizer = MuonWithAdamW(groups_of(matrices, other), **SETTINGS, ranks=alone)
    for gradients in random_gradients():
        for parameter, gradient in zip((*matrices, other), gradients, strict=True):
            parameter.grad = gradient
        state = optimizer.state_dict()
        optimizer = MuonWithAdamW(groups_of(matrices, other), **SETTINGS, ranks=alone)
        optimizer.load_state_dict(state)
        optimizer.step()
    for ours, theirs in zip((*matrices, other), torchs_own(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.usefixtures("in_bf16")
def test_a_step_on_a_slice_is_that_on_whole_matrices():
    """The slice holds all matrices, one behind the other, and padding, as under ZeRO-1."""
    *matrices, other = parameters()
    alone = SimpleNamespace(replica_rank=0, replica_size=1)
    optimizer = MuonWithAdamW(groups_of(matrices, other), **SETTINGS, ranks=alone)
    slice_ = torch.nn.Parameter(
        torch.cat([m.detach().flatten() for m in matrices] + [torch.ones(3)])
    )
    optimizer.param_groups[1]["params"] = [slice_]
    for *gradients, _ in random_gradients():
        slice_.grad = torch.cat([g.flatten() for g in gradients] + [torch.zeros(3)])
        optimizer.step()
    expected = torch.cat([matrix.detach().flatten() for matrix in torchs_own()[:-1]])
    torch.testing.assert_close(slice_.detach()[:-3], expected, rtol=1e-5, atol=1e-6)


def torchs_own_on(matrices, gradients):
    muon = torch.optim.Muon(
        matrices, lr=0.1, weight_decay=0.2, momentum=0.9, adjust_lr_fn="match_rms_adamw"
    )
    for parameter, gradient in zip(matrices, gradients, strict=True):
        parameter.grad = gradient
    muon.step()


@pytest.mark.usefixtures("in_bf16")
@pytest.mark.parametrize("sliced", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_fused_matrices_are_split_as_their_layers_read_them(split, sliced):
    """Torch's Muon steps on queries, keys, values, value and gate, cut out by the layers' use."""
    sizes = {"num_heads": 4, "num_kv_heads": 2, "activation": "swiglu"}
    gpt: GPT = model(**sizes)
    attention, mlp = gpt.layers[0].attention, gpt.layers[0].mlp
    *others, hidden = parameter_groups(gpt, MUON)
    hidden["weight_decay"] = 0.2
    alone = SimpleNamespace(replica_rank=0, replica_size=1)
    optimizer = MuonWithAdamW([*others, hidden], **SETTINGS | {"split_fused": split}, ranks=alone)
    matrices = hidden["params"]
    gradients = [torch.randn_like(each) for each in matrices]

    def pieces(whole):
        """Return the matrices that Muon should see, as the layers divide their outputs."""
        found = []
        for own, weight in zip(matrices, whole, strict=True):
            if split and own is attention.query_key_value.weight:
                heads = by_key_heads(weight.T[None], 2, attention.shape.head_size)
                found += [
                    x[0].mT.flatten(0, 1) for x in divide_heads(heads, attention.shape.head_size)
                ]
            elif split and own is mlp.dense_h_to_4h.weight:
                found += weight.chunk(2)
            else:
                found.append(weight)
        return [torch.nn.Parameter(each.detach().clone()) for each in found]

    expected = pieces(matrices)
    assert len(expected) == len(matrices) + 3 * split
    torchs_own_on(expected, [each.detach() for each in pieces(gradients)])
    if sliced:  # as under ZeRO-1
        slice_ = torch.nn.Parameter(torch.cat([m.detach().flatten() for m in matrices]))
        slice_.grad = torch.cat([each.flatten() for each in gradients])
        optimizer.param_groups[-1]["params"] = [slice_]
        optimizer.step()
        ends = slice_.detach().split([m.numel() for m in matrices])
        found = [x.view_as(m) for x, m in zip(ends, matrices, strict=True)]
    else:
        for matrix, gradient in zip(matrices, gradients, strict=True):
            matrix.grad = gradient
        optimizer.step()
        found = matrices
    for ours, theirs in zip(pieces(found), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.usefixtures("in_bf16")
@pytest.mark.parametrize("ranks", [2, 3, 8, 76])
def test_each_rank_updates_its_own_slice(monkeypatch, ranks):
    """76 elements on 3 ranks are slices of 26, which cut matrices; on 8 ranks slices of 10.

    After one step, the momentum is 0.1 g, and Nesterov's update 0.9 x 0.1 g + 0.1 g = 0.19 g.
    """
    gradients = random_gradients(1)[0][:-1]
    size = -(-76 // ranks)
    padding = torch.zeros(size * ranks - 76)
    flat = torch.cat([g.flatten() for g in gradients] + [padding])

    def gather(whole, piece, group):
        assert group == "replicas" and whole.numel() == flat.numel()
        whole.copy_((0.19 * flat).to(whole.dtype))

    monkeypatch.setattr(torch.distributed, "all_gather_into_tensor", gather)
    found = []
    for rank in range(ranks):
        *matrices, other = parameters()
        groups = SimpleNamespace(replica_rank=rank, replica_size=ranks, replicas="replicas")
        optimizer = MuonWithAdamW(groups_of(matrices, other), **SETTINGS, ranks=groups)
        slice_ = torch.nn.Parameter(torch.full((size,), 0.5))
        optimizer.param_groups[1]["params"] = [slice_]
        slice_.grad = flat[rank * size : (rank + 1) * size]
        optimizer.step()
        found.append(slice_.detach())
    expected = torch.cat([matrix.detach().flatten() for matrix in torchs_own(1)[:-1]])
    torch.testing.assert_close(torch.cat(found)[:76], expected, rtol=0, atol=2e-3)


KEYS = {
    "optimizer": {"type": "Muon", "params": {"lr": 0.01}},
    "train_batch_size": 8,
    "save_interval": 3,
    "weight_decay": 0.1,
    "theta_lr_multiplier": 10.0,
}
JOBS = {
    1: {"zero0": cell(0, "fp32"), "zero1": cell(1, "fp32"), "zero0-bf16": cell(0, "bf16")},
    2: {
        "dp2-zero1": cell(1, "fp32"),
        "dp2-zero1-bf16": cell(1, "bf16"),
        "pp2": {"pipe_parallel_size": 2},
    },
}


def train(groups, folder, prefix):
    for name, keys in JOBS[groups.world_size].items():
        train_run(groups, folder / name, prefix, KEYS | keys)
        again = folder / f"{name} again"
        train_run(groups, again, prefix, KEYS | keys, source=folder / name, step=3)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("muon")
    prefix = write_shards(folder)
    for size in JOBS:
        run_ranks(size, train, folder, prefix)
    return folder


@pytest.mark.parametrize("name", [name for jobs in JOBS.values() for name in jobs])
def test_every_layout_computes_the_same_and_resumes(runs, name):
    bf16 = "bf16" in name
    assert rows(runs / name) == pytest.approx(rows(runs / "zero0"), abs=0.05 if bf16 else 2e-3)
    assert digest(runs / name) == digest(runs / f"{name} again")
    if not bf16:
        weights, expected = (newest(runs / run).weights() for run in (name, "zero0"))
        for key, value in expected.items():
            torch.testing.assert_close(weights[key], value, rtol=0, atol=5e-3, msg=key)
