"""Define the resolved config: immutable sections with typed fields (`sections/`).

In config files, the key of a field is the field's name, unless an annotation `Key` gives another
key. `Key(None)` marks a field that config files cannot set, because it is always derived. Defaults
are those of GPT-NeoX. If the published KERPLE code and current gpt-neox have different defaults, a
comment names the default that is used. Lengths are counted in tokens, iterations in optimizer
steps, and batch sizes in sequences.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from megatron.config import flat
from megatron.config.sections.base import Section
from megatron.config.sections.data import DataConfig, EvaluationConfig, LoggingConfig
from megatron.config.sections.model import ModelConfig
from megatron.config.sections.parallel import CheckpointConfig, ParallelConfig
from megatron.config.sections.training import BatchConfig, LrConfig, OptimizerConfig, TrainingConfig


class Config(Section):
    """All settings of a run. Configs with equal sections are equal.

    Attributes:
        notes: Remarks for the user, for example about keys that have no effect.
        sources: The paths of the config files.
        origins: Maps the name of each field that the user set to its origin: the file and line, or
            the override.
    """

    # Built by `load_config`.

    model: ModelConfig
    data: DataConfig
    batch: BatchConfig
    optimizer: OptimizerConfig
    lr: LrConfig
    training: TrainingConfig
    parallel: ParallelConfig
    checkpoint: CheckpointConfig
    evaluation: EvaluationConfig
    logging: LoggingConfig
    notes: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    origins: Mapping[str, str] = {}

    def sections(self) -> Iterator[tuple[str, Section]]:
        """Return pairs (section name, section), in the order in which the fields are declared."""
        return ((name, getattr(self, name)) for name in SECTIONS)

    def length_of(self, step: int) -> int:
        """Return the sequence length of the training step `step`. The first step is step 1."""
        begun = [length for after, length in self.training.curriculum if after < step]
        return begun[-1] if begun else self.model.seq_length

    def to_flat_dict(self) -> dict[str, Any]:
        """Return all settings as a dict of GPT-NeoX keys that can be written as JSON or YAML.

        With the same number of processes, loading that dict gives a config that equals `self`.
        """
        return flat.to_flat_dict(section for _, section in self.sections())

    def to_yaml(self) -> str:
        """Return all settings as YAML text, from which `load_config` reads the same values."""
        return flat.to_yaml(self.to_flat_dict())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Config):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in SECTIONS)

    __hash__ = None  # type: ignore[assignment]


SECTIONS: dict[str, type[Section]] = {
    name: info.annotation
    for name, info in Config.model_fields.items()
    if isinstance(info.annotation, type) and issubclass(info.annotation, Section)
}
