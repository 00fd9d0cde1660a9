"""List other names (aliases) of positional embeddings, and the files that define no embedding."""

OTHERS = {"base", "combination", "fixed_value", "hidden_layer", "theta_bounds", "theta_parameter"}
"""The files of `megatron/positional` that define no embedding."""
PUBLISHED_POSITIONAL_NAMES = {
    "kerple_power_ap_": "kerple_power",
    "kerple_power__ap": "kerple_power_mul",
    "kerple_power_ap_ap": "kerple_power_add_mul",
}
"""Maps names of the published KERPLE code to the names of the same embeddings in this project."""
POSITIONAL_ALIASES = PUBLISHED_POSITIONAL_NAMES | {"kerple": "kerple_log"}  # DAPE's name
"""Maps all accepted names that are not the names of files in `megatron/positional`."""
