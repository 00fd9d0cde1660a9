from pathlib import Path

import pytest

import prepare_data


@pytest.fixture
def run(tmp_path, capsys):
    """Return run(inputs, *flags, code), which prepares the data set x and returns the output."""

    def prepare(inputs: list[Path], *flags: object, code: int = 0, name: str = "x") -> str:
        arguments = ["--input", *inputs, "--name", name, "-d", tmp_path / "out", "--workers", 1]
        assert prepare_data.main(list(map(str, [*arguments, *flags]))) == code
        said = capsys.readouterr()
        return said.out + said.err

    return prepare
