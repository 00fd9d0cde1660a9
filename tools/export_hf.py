"""Export a run for Hugging Face's transformers.

    python tools/export_hf.py RUN DIR [--dtype bfloat16] [--license apache-2.0]

The newest checkpoint of the run folder RUN is written to the new folder DIR. DIR contains
config.json, model.safetensors, the tokenizer's files and a model card, README.md. If no class of
transformers in `megatron/hub/classes.yml` computes the same function as the model, DIR also
contains the model's code, modeling_kerple.py. In any environment with torch and transformers, these
lines load the model and its tokenizer:

    AutoModelForCausalLM.from_pretrained(DIR, trust_remote_code=True)
    AutoTokenizer.from_pretrained(DIR, trust_remote_code=True)

Before DIR appears, the tool loads the export in this way, and compares its logits and token ids
with those of this project. See docs/huggingface.md.
"""

import os
import tempfile
from importlib.util import find_spec
from pathlib import Path

from megatron import entry

PRECISIONS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp32"}
"""Maps the dtype of an export to the config's precision in which the weights are read."""


@entry.reports
def main() -> int:
    """Export the run. Return exit code 0, or 1 if the export is impossible."""
    parser = entry.parser(__doc__)
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="run folder")
    add("target", type=Path, metavar="DIR", help="new folder")
    dtype_help = "of the written weights (default: the run's precision)"
    add("--dtype", choices=PRECISIONS, help=dtype_help)
    config_help = "config files (default: config.yml of the run)"
    add("--config", type=Path, nargs="+", default=[], metavar="FILE", help=config_help)
    override_help = "a config key, such as eval_distance_scale=0.5"
    add("-o", action="append", default=[], metavar="K=V", help=override_help)
    licence_help = "the licence in the model card, such as apache-2.0 (default: unknown)"
    add("--license", default="unknown", metavar="NAME", help=licence_help)
    args = parser.parse_args()
    if not args.run.is_dir():
        parser.error(f"{args.run}: no such folder; name the `save` folder of a run")
    if find_spec("transformers") is None:
        entry.refuse("error: needs transformers: pip install -r requirements-hub.txt", 1)
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory() as modules:
        os.environ["HF_MODULES_CACHE"] = modules  # transformers copies modeling_kerple.py there
        import torch

        from megatron.engine.checkpoint.publish import new_folder
        from megatron.engine.open_run import open_run
        from megatron.hub.export import export
        from megatron.parallel.groups import build_groups

        given = ["attention_backend=eager", *args.o]
        given += [f"precision={PRECISIONS[args.dtype]}"] if args.dtype else []
        with new_folder(args.target) as folder:
            cpu = build_groups(torch.device("cpu"))
            run = open_run(args.run, None, cpu, files=args.config, overrides=given)
            if args.dtype == "float64":
                run.model.double()
            lines = [*run.notes, *export(run, folder, args.license)]
        print("\n".join([*lines, f"{run.saved.path} -> {args.target}"]))
    return 0


if __name__ == "__main__":
    entry.run(main)
