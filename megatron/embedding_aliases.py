"""Other names of positional embeddings, which configurations and `load` accept."""

from __future__ import annotations

PUBLISHED_POSITIONAL_NAMES = {
    "kerple_power_ap_": "kerple_power",
    "kerple_power__ap": "kerple_power_mul",
    "kerple_power_ap_ap": "kerple_power_add_mul",
}
"""Maps names of the published KERPLE code to the names of the same embeddings in this project."""
POSITIONAL_ALIASES = PUBLISHED_POSITIONAL_NAMES | {"kerple": "kerple_log"}  # DAPE's name
"""Maps all accepted names that are not the names of files in `megatron/positional`."""
