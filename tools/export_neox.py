"""Export a checkpoint of this project to the layout of the published code (GPT-NeoX's pipeline).

    python tools/export_neox.py SRC DST [--tp N]

SRC is a run folder. Its newest checkpoint is exported for N tensor-parallel ranks. By default, N is
the number of tensor-parallel ranks in training. The tool writes the file `latest` and the folder
`global_step<step>/` into DST. The folder contains the files `layer_XX-model_YY-model_states.pt` and
`mp_rank_YY_model_states.pt`, where XX is the layer and YY is the tensor-parallel rank.

If a published checkpoint is imported and then exported, the exported tensors equal the original
tensors.

To load the export, set these keys in the published code's config:

- `no_load_optim: true`, because the export contains no optimizer state.
- `make_vocab_size_divisible_by`, only if N differs from the number of tensor-parallel ranks in
  training. Set it to the padded vocabulary size divided by N, because the published code compares
  its own padded size with the padded size in the checkpoint.
- `rmsnorm_fusion: false`, only for gpt-neox since May 2025 and a model with `norm: rmsnorm`. There,
  this norm adds its epsilon inside the root, as the fused norm does. But with `use_qk_layernorm`,
  the fused norm takes its mean over all heads of a rank.
"""

from pathlib import Path

from megatron import entry
from megatron.engine.checkpoint.exchange import export_checkpoint


@entry.reports
def main() -> int:
    """Export the checkpoint. Return exit code 0, or 1 if the export is impossible."""
    parser = entry.parser(__doc__)
    parser.add_argument("source", type=Path, metavar="SRC")
    parser.add_argument("target", type=Path, metavar="DST")
    parts_help = "tensor-parallel ranks (default: as many as it was trained with)"
    parser.add_argument("--tp", type=entry.number(int, 1), metavar="N", help=parts_help)
    args = parser.parse_args()
    if not args.source.is_dir():
        parser.error(f"{args.source}: no such folder; name the `save` folder of a run")
    written = export_checkpoint(args.source, args.target, parts=args.tp)
    print(f"{args.source} -> {written}: {len(list(written.glob('*.pt')))} files")
    return 0


if __name__ == "__main__":
    entry.run(main)
