"""Import a model of transformers (GPT-2, Llama, Qwen and others) into a new run folder.

    python tools/import_hf.py DIR RUN

DIR contains config.json and safetensors files, as `save_pretrained` writes them, and tokenizer.json
or tokenizer.model. RUN is a new or empty folder. To use the imported model, pass RUN to evaluate.py
or generate.py as `--load`. To train the imported model further, set the config keys `load: RUN` and
`finetune: true`. The weights keep their values and dtypes.

Only JSON, safetensors and tokenizer.model are read. Pickles (`pytorch_model.bin`) are refused, and
code in DIR is never run.
"""

from pathlib import Path

from megatron import entry


@entry.reports
def main() -> int:
    """Import the model. Return exit code 0, or print an error and return 1."""
    parser = entry.parser(__doc__)
    parser.add_argument("source", type=Path, metavar="DIR")
    parser.add_argument("target", type=Path, metavar="RUN")
    args = parser.parse_args()
    if not args.source.is_dir():
        parser.error(f"{args.source}: no such folder; name one that transformers has written")
    from megatron.hub.importing import import_folder

    for line in import_folder(args.source, args.target):
        print(line)
    return 0


if __name__ == "__main__":
    entry.run(main)
