"""Turn text into training batches: corpora, tokenizers, token shards and samples."""
