"""Report which model files of GPT-NeoX or of a fork load here, and why the others do not.

    python tools/check_neox_configs.py GPT_NEOX_CHECKOUT [KERPLE_CHECKOUT ...]

A model file is a YAML file in a folder `configs` or `kerple_configs` that sets `num_layers` and
`hidden_size`, and whose `train_iters` is not 0. As the READMEs of the checkouts describe, two other
files may be loaded together with a model file. `llama/train_config.yml` is added if the model file
has no optimizer. `local_setup.yml` is added if it has no key in common with the model file. The
files in `kerple_configs` get `pos_emb: kerple_log`, because KERPLE's scripts add such a key. The
number of processes is the product of a file's parallel sizes.

A fine-tuning file may be refused because the `save` in `local_setup.yml` equals the `load` in the
fine-tuning file. If this is the only error, the fine-tuning file is loaded again with the `save`
that the error message proposes.
"""

import math
import re
from pathlib import Path

from megatron import entry
from megatron.config import Config, ConfigError, load_config
from megatron.config.reader import read_file

FOLDERS = ("configs", "kerple_configs")


def model_files(root: Path) -> list[Path]:
    """Return the YAML files in the checkout `root` that describe a model to train.

    Such a file sets `num_layers` and `hidden_size`, and its `train_iters` is not 0.
    """
    found = [path for folder in FOLDERS for path in sorted((root / folder).rglob("*.yml"))]
    return [path for path in found if _is_model(_keys(path))]


def combination(path: Path, root: Path) -> list[Path]:
    """Return the model file `path` and the files to load together with it, in loading order.

    Args:
        path: The model file.
        root: The checkout that contains the model file.
    """
    folder, keys = root / path.relative_to(root).parts[0], _keys(path)
    files, train, setup = [path], folder / "llama" / "train_config.yml", folder / "local_setup.yml"
    if "optimizer" not in keys:
        files.append(train)
    if setup.is_file() and not keys.keys() & _keys(setup).keys():
        files.append(setup)
    return files


def check(path: Path, root: Path) -> tuple[Config | None, list[str]]:
    """Check whether the model file `path` of the checkout `root` can be loaded.

    Returns:
        (config, texts). If the file is accepted, the texts are the overrides that were needed to
        load it. If the file is refused, the config is None and the texts are the errors.
    """
    files, keys = combination(path, root), _keys(path)
    degrees = (keys.get(f"{kind}_parallel_size", 1) for kind in ("pipe", "model"))
    ranks = math.prod(max(1, each) for each in degrees if isinstance(each, int))
    fixed = ["pos_emb=kerple_log"] if files[0].parent.name == FOLDERS[1] else []
    overrides: list[str] = []
    while True:
        try:
            config = load_config(files, [*fixed, *overrides], world_size=ranks)
        except ConfigError as error:
            remedy = re.search(r"; add -o (save=\S+)$", str(error.problems[0]))
            if remedy and len(error.problems) == 1 and not overrides:
                overrides = [remedy[1]]
                continue
            return None, [f"{problem.key}: {problem.text}" for problem in error.problems]
        return config, [f"with -o {override}" for override in overrides]


def _keys(path: Path) -> dict:
    """Return the top-level keys of a YAML file with their values."""
    return {keys[0]: given.value for keys, given in read_file(path)[0].items()}


def _is_model(keys: dict) -> bool:
    return {"num_layers", "hidden_size"} <= keys.keys() and keys.get("train_iters") != 0


def main() -> int:
    """Check the model files of all given checkouts, and return the exit code.

    Print one line for each file, then counts. The exit code is 0, or 1 if there is no model file.
    """
    parser = entry.parser(__doc__)
    parser.add_argument("checkouts", nargs="+", type=Path, metavar="CHECKOUT")
    total, accepted = 0, 0
    roots = parser.parse_args().checkouts
    for root in roots:
        if not any((root / folder).is_dir() for folder in FOLDERS):
            parser.error(f"{root} has no folder {' or '.join(FOLDERS)}; name a checkout")
    for root in roots:
        for path in model_files(root):
            config, texts = check(path, root)
            name, total = f"{root.name}/{path.relative_to(root)}", total + 1
            accepted += config is not None
            print(f"{'accepted' if config else 'refused':<9} {name}")
            for text in texts:
                print(f"          {text}")
    print(f"{accepted} of {total} model files accepted, {total - accepted} refused")
    return 0 if total else 1


if __name__ == "__main__":
    entry.run(main)
