"""Damaged configs: an error that lists problems, or a config."""

from __future__ import annotations

from hypothesis import example, given

from megatron.config import Config, ConfigError, load_config
from tests.fuzz.damage import damaged, in_time, written
from tests.helpers.paths import ROOT

FILES = [*(ROOT / "configs").rglob("*.yml")]
CONTENTS = [path.read_bytes() for path in FILES]
LAUGHS = b"a0: &a0 [x, x]\n" + b"".join(
    b"a%d: &a%d [*a%d, *a%d]\n" % (i, i, i - 1, i - 1) for i in range(1, 30)
)


@given(damaged(CONTENTS))
@example(CONTENTS[0])
@example(LAUGHS)
@example(b"num_layers: &a [*a]\n")
@example(b"[" * 3000)
@example(b"num_layers: " + b"1" * 5000)
@example(b"num_layers: 0x" + b"f" * 5000)
@example(b"num_layers: 1:" + b"59:" * 3000 + b"1")
@example(b"? [a, b]\n: c\n")
@example(b"num_layers: !!python/object/apply:os.system [exit]\n")
@example(b"num_layers: 2001-99-99\n")
@example(b"<<: [1]\n")
def test_a_config(content: bytes) -> None:
    path = written("config.yml", content)
    try:
        with in_time():
            config = load_config([path, ROOT / "configs/quickstart.yml"])
    except ConfigError as error:
        assert str(path) in str(error) or "config" in str(error)
    else:
        assert isinstance(config, Config)
