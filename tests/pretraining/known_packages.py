"""Read the versions of all packages once, for the run.json of every run that is forked later."""

from megatron.pretraining.provenance import versions

versions()
