"""Everything from text to training batches: corpora, tokenizers, token shards, samples."""
