"""Test how theta is divided, joined and named, for every combination of embeddings."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from megatron.attention import choose
from megatron.model import GPT, BlockShape, GPTShape, Plan
from megatron.model.theta import (
    SHARED_THETA,
    THETA,
    columns_of,
    divided_theta,
    named_theta,
    trained_theta,
)
from megatron.positional import PerLayer, PositionalEmbedding, PositionalError, load, names

HEADS = 3


def combinations() -> list[str]:
    """Return every embedding, and every `a + b` that one layer can have."""
    found = list(names())
    for pair in itertools.permutations(names(), 2):
        name = " + ".join(pair)
        try:
            load(name)
        except PositionalError:  # both act on the same place
            continue
        found.append(name)
    return found


@dataclass
class Column:
    owner: str
    name: str
    trained: bool
    shared: bool


def columns(name: str) -> list[Column]:
    """Return the columns of an embedding, from the parameters of its terms alone."""
    terms = name.split(" + ")
    return [
        Column(name, p.name if len(terms) == 1 else f"{term}.{p.name}", p.trained, p.shared)
        for term in terms
        for p in load(term).parameters
    ]


def numbered(count: int) -> Tensor:
    """Return theta [heads, count], whose entry of head h and column n is 1000 h + n."""
    return 1000.0 * torch.arange(HEADS)[:, None] + torch.arange(count)


def heads(n: int, shared: bool) -> list[float]:
    return [1000.0 * head + n for head in range(1 if shared else HEADS)]


def lists(found: dict[str, Tensor]) -> dict[str, list]:
    return {name: values.tolist() for name, values in found.items()}


def test_all_pairs_are_tested():
    assert len(combinations()) > 300 and "alibi + fire" in combinations()


@pytest.mark.parametrize("first", names())
def test_the_names_of_a_combination(first):
    for name in (each for each in combinations() if each.split(" + ")[0] == first):
        trained = [column for column in columns(name) if column.trained]
        theta_HN = numbered(len(trained))
        expected = {c.name: heads(n, c.shared) for n, c in enumerate(trained)}
        if len(expected) > 8:
            own, shared = ([n for n, c in enumerate(trained) if c.shared == x] for x in (0, 1))
            expected = {"table": [[1000.0 * head + n for n in own] for head in range(HEADS)]}
            expected |= {"shared": [float(n) for n in shared]} if shared else {}
        assert lists(named_theta(load(name), theta_HN)) == expected, name


@pytest.mark.parametrize("first", names())
def test_the_trained_columns_are_divided_and_joined_in_order(first):
    for name in (each for each in combinations() if each.split(" + ")[0] == first):
        pos, all_of_it = load(name), columns(name)
        theta_HN = numbered(len(all_of_it))
        trained = [n for n, column in enumerate(all_of_it) if column.trained]
        shared = [n for n in trained if all_of_it[n].shared]
        parts = divided_theta(pos, theta_HN)
        assert list(parts) == [THETA, SHARED_THETA][: bool(trained) + bool(shared)], name
        if trained:
            theta_HN[:, shared] = theta_HN[:1, shared]
            assert torch.equal(trained_theta(pos, list(parts.values())), theta_HN[:, trained])


def per_layer(layers: list[str], *, own_theta: bool) -> PerLayer:
    known = {name: load(name) for name in layers}
    return PerLayer([known[name] for name in layers], own_theta=own_theta)


LEARNED = [name for name in names() if load(name).trained_parameters]


@pytest.mark.parametrize("own_theta", [False, True])
@pytest.mark.parametrize("first", [*LEARNED, "sink + kerple_log", "rotary + gaussian"])
def test_the_names_of_unlike_layers(first, own_theta):
    """With layers a, b, a, each name has the values of one embedding, in the order of layers."""
    for second in LEARNED:
        layers = [first, second, first] if first != second else [first, first]
        stored = layers if own_theta else list(dict.fromkeys(layers))
        trained = [column for name in stored for column in columns(name) if column.trained]
        theta_HN = numbered(len(trained))
        where: dict[tuple[str, str], list[list[float]]] = {}
        for n, column in enumerate(trained):
            where.setdefault((column.owner, column.name), []).append(heads(n, column.shared))
        found = named_theta(per_layer(layers, own_theta=own_theta), theta_HN)
        if len(where) > 8:
            assert list(found) == ["table", "shared"][: 1 + any(c.shared for c in trained)]
            continue
        owners = [name for _, name in where]
        expected = {
            name if owners.count(name) == 1 else f"{owner}.{name}": values
            for (owner, name), values in where.items()
        }
        single = {name: each[0] if len(each) == 1 else each for name, each in expected.items()}
        assert lists(found) == single, layers


def test_unlike_layers_of_which_one_has_theta():
    pos = per_layer(["rotary", "kerple_log", "rotary"], own_theta=False)
    assert lists(named_theta(pos, numbered(2))) == {
        "bias_p": heads(0, False),
        "bias_a": heads(1, False),
    }


def built(pos: PositionalEmbedding, **plan) -> GPT:
    attend = choose("eager", pos, device_type="cpu", dtype=torch.float32)
    block = BlockShape(hidden_size=12, num_heads=HEADS)
    return GPT(Plan(GPTShape(1, 64, block=block, max_positions=8), pos, attend, 1, **plan))


@pytest.mark.parametrize("name", ["alibi + kerple_log", "fire + alibi", "sandwich + fire", "fire"])
def test_the_model_returns_all_kinds_of_columns_in_order(name):
    """theta [heads, columns] has fixed, own and shared columns where the embedding has them."""
    pos = load(name)
    model = built(pos, theta_frozen=(pos.trained_parameters[0].name,))
    _, theta_HN = model.embedding(torch.zeros(1, 4, dtype=torch.long))
    fixed = columns_of(pos, trained=False)
    assert torch.equal(theta_HN[:, fixed], pos.initial_theta(HEADS)[:, fixed])
    expected = trained_theta(pos, model.theta_parts)
    assert torch.equal(theta_HN[:, columns_of(pos, trained=True)], expected)
    theta_HN.sum().backward()
    gradient_HN = trained_theta(pos, [part.grad for part in model.theta_parts])
    assert not gradient_HN[:, 0].any() and gradient_HN[:, 1:].all()
