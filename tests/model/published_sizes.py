"""The published numbers of parameters, and how parameters are counted."""

from __future__ import annotations

import torch

from megatron.config import Config
from megatron.engine.build import plan_of
from megatron.model import GPT

PYTHIA = {
    ("14M", 128): (14_067_712, 1_189_888),
    ("31M", 128): (30_494_720, 4_739_072),
    ("19M", 128): (70_426_624, 18_915_328),
    ("small", 128): (162_322_944, 85_056_000),
    ("medium", 128): (405_334_016, 302_311_424),
    ("800M", 128): (1_011_781_632, 805_736_448),
    ("xl", 128): (1_414_647_808, 1_208_602_624),
    ("2-7B", 128): (2_775_208_960, 2_517_652_480),
    ("6-7B", 256): (6_857_302_016, 6_444_163_072),
    ("12B", 512): (11_846_072_320, 11_327_027_200),
    ("20B", 256): (20_554_567_680, 19_934_859_264),  # GPT-NeoX-20B, model card
}
"""Name and divisor of the vocabulary -> (all parameters, those beside embeddings), from
github.com/EleutherAI/pythia and the models' pages."""
GPT3 = {
    "small": 125e6,
    "medium": 350e6,
    "large": 760e6,
    "xl": 1.3e9,
    "2-7B": 2.7e9,
    "6-7B": 6.7e9,
    "13B": 13e9,
    "175B": 175e9,
}
"""The names of the sizes in gpt-neox -> the parameters in GPT-3 (2005.14165, table 2.1), whose
embeddings are tied."""
BESIDE_EMBEDDINGS = {"19M": 19e6, "49M": 49e6, "800M": 800e6}  # named so by gpt-neox


def parameters(config: Config, vocabulary: int) -> tuple[int, int]:
    """Return (all parameters, those beside embeddings), counted on the meta device."""
    with torch.device("meta"):
        model = GPT(plan_of(config, vocabulary, device_type="cpu", eod=0))
    assert all(each.is_meta for each in model.parameters())
    sizes = {name: each.numel() for name, each in model.named_parameters()}
    embeddings = ("embedding.", "output.")
    return sum(sizes.values()), sum(n for k, n in sizes.items() if not k.startswith(embeddings))
